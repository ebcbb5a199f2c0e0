"""What people order while a worker runs: other versions of its models.

Everything is on the event loop's thread. Whoever ordered it asks again until it is over.
"""

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from celery import Celery

from batchery.device_names import is_joint
from batchery.errors import SettingsError, StartError
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery.settings import ModelSettings
from batchery_worker.device_pool.process import DeviceProcess, State
from batchery_worker.device_pool.supervisor import DeviceSupervisor
from batchery_worker.ipc.messages import NotReady, Ready, Reload, Reloaded, Reply, Setup

logger = logging.getLogger("batchery.pool")

#: Number of orders that are remembered after their end.
MAX_ORDERS = 16

#: Settings of a model that its task depends on, and so the main process.
FIXED = ("kind", "engine")


@dataclass(slots=True)
class DeviceReload:
    """How far an order is on one device."""

    #: `waiting`, `loading`, `reloaded` or `failed`.
    state: str = "waiting"
    #: What is served now, and what was before.
    version: str = ""
    before: str = ""
    load_s: float = 0.0
    #: Why it has failed.
    error: str = ""
    #: Settings of the version before, and when the process was started that it was begun with.
    previous: ModelSettings | None = None
    spawned_s: float = 0.0

    def report(self) -> dict[str, Any]:
        """The same for whoever asks."""
        names = ("state", "version", "before", "load_s", "error")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class ReloadOrder:
    """Another version of a model, for all devices that serve it."""

    task: str
    settings: ModelSettings | None = None
    force: bool = False
    devices: dict[str, DeviceReload] = field(default_factory=dict)
    #: Why nothing can be done.
    error: str = ""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return all(each.state in ("reloaded", "failed") for each in self.devices.values())

    def report(self) -> dict[str, Any]:
        """The same for whoever asks."""
        devices = {name: each.report() for name, each in self.devices.items()}
        return {"devices": devices, "is_over": self.is_over, "error": self.error}


class DeviceControl:
    """Carries out orders, one after the other, and each on one device after the other."""

    def __init__(self, app: Celery, supervisor: DeviceSupervisor) -> None:
        self._app = app
        self._supervisor = supervisor
        supervisor.on_change = self._on_change
        self._orders: dict[str, ReloadOrder] = {}
        #: Differences between devices that the log has.
        self._told: set[frozenset[str]] = set()

    @property
    def _all_devices(self) -> list[DeviceProcess]:
        """Those that were given up among them."""
        return [*self._supervisor.devices, *self._supervisor.given_up]

    def reload(self, number: str, task: str, **options: Any) -> None:
        """Begins an order, unless it has begun.

        Args:
            number: Made by whoever orders; the same each time that it asks.
            task: Name of the model.
            options: See `_plan`.
        """
        if number in self._orders:
            return
        try:
            order = self._plan(task, **options)
        except StartError as error:
            order = ReloadOrder(task, error=str(error))
        self._orders[number] = order
        for old in list(self._orders)[:-MAX_ORDERS]:
            if self._orders[old].is_over:
                del self._orders[old]
        self._advance()

    def report(self, number: str) -> dict[str, Any]:
        """How far an order is; as of one that has not begun if it is not known."""
        order = self._orders.get(number)
        return {"devices": {}, "is_over": False} if order is None else order.report()

    def _plan(
        self,
        name: str,
        model: str | None = None,
        revision: str | None = None,
        *,
        force: bool = False,
    ) -> ReloadOrder:
        """Chooses the settings, and the devices.

        Args:
            name: Of the task.
            model: Folder or id on the hub; None for what the settings say now.
            revision: Of the model; None for what the settings say, if they name the model.
            force: Whether vectors may have other dimensions.

        Raises:
            SettingsError: They are wrong, or the model must not change so much while it runs.
        """
        devices = [each for each in self._all_devices if _serves(each, name)]
        if not devices:
            return ReloadOrder(name)
        own = _own_settings(self._app, name)
        settings = None
        if own is not None:
            settings = get_installation(self._app).read_settings().models.get(name, own)
            # A revision belongs to a model.
            given = {"model": model, "revision": revision} if model else {"revision": revision}
            if model or revision:
                settings = settings.model_copy(update=given)
            for each in FIXED:
                before, now = getattr(own, each), getattr(settings, each)
                if before != now:
                    raise SettingsError(
                        f"model {name!r}: {each} was {before} when this worker started, and is"
                        f" {now} now; restart the worker"
                    )
        elif model or revision:
            raise SettingsError(
                f"model {name!r}: the app's own class says what it loads; --model and --revision"
                " are for models of the settings"
            )
        return ReloadOrder(name, settings, force, {each.name: DeviceReload() for each in devices})

    def _advance(self) -> None:
        for order in list(self._orders.values()):
            if not order.is_over:
                self._go_on(order)
            if not order.is_over:
                return

    def _go_on(self, order: ReloadOrder) -> None:
        devices = {each.name: each for each in self._all_devices}
        for name, step in order.devices.items():
            device = devices[name]
            if step.state in ("reloaded", "failed"):
                continue
            if step.state == "loading":
                return
            if any(each.state == "failed" for each in order.devices.values()):
                _fail(order, name, "not tried, as another device failed")
            elif device.state is State.GIVEN_UP:
                step.state = "reloaded"  # It never starts again.
            else:
                if device.state is State.READY:
                    self._begin(order, device)
                return

    def _begin(self, order: ReloadOrder, device: DeviceProcess) -> None:
        step, own = order.devices[device.name], _own_settings(self._app, order.task)
        step.state, step.spawned_s = "loading", device.spawned_s
        step.before = _read_versions(device).get(order.task, "")
        if order.task not in device.setup.versions:
            # The settings may have changed: a process that starts anew must load the old version.
            device.setup = _with_version(device.setup, order.task, own)
        step.previous = device.setup.versions.get(order.task)
        if _needs_fresh(device):
            device.setup = _with_version(device.setup, order.task, order.settings)
            self._supervisor.renew(device)
        else:
            message = Reload(order.task, order.settings, order.force)
            end_late = partial(self._end_late, order, device, device.spawned_s)
            self._supervisor.tell(device, message, end_late)

    def _end_late(self, order: ReloadOrder, device: DeviceProcess, spawned_s: float) -> None:
        """Gives up a version whose load hangs, and with it the process that might yet serve it."""
        if order.devices[device.name].state == "loading" and device.spawned_s == spawned_s:
            _fail(order, device.name, "it was not loaded within device_start_timeout_s")
            self._supervisor.renew(device)
            self._advance()

    def _on_change(self, device: DeviceProcess, reply: Reply | None) -> None:
        for order in self._orders.values():
            step = order.devices.get(device.name)
            if step is not None and step.state == "loading":
                judge = self._judge_fresh if _needs_fresh(device) else self._judge_swap
                judge(order, device, reply)
        self._advance()
        if isinstance(reply, Ready):
            self._warn_of_differences(device)

    def _judge_swap(self, order: ReloadOrder, device: DeviceProcess, reply: Reply | None) -> None:
        """Of a device that loads a version beside the old one."""
        if isinstance(reply, Reloaded):
            if reply.error:
                _fail(order, device.name, reply.error)
            else:
                _succeed(order, device, reply.version, reply.load_s)
        elif isinstance(reply, Ready):
            # It was recycled for another reason, and has forgotten the order.
            self._begin(order, device)
        elif reply is None:
            _fail(order, device.name, "its process ended while it loaded the new version")

    def _judge_fresh(self, order: ReloadOrder, device: DeviceProcess, reply: Reply | None) -> None:
        """Of a device that gets a fresh process."""
        step = order.devices[device.name]
        if isinstance(reply, NotReady) or (reply is None and device.failed_starts):
            # What it starts next has the old version.
            device.setup = _with_version(device.setup, order.task, step.previous)
            text = "its fresh process ended while it started"
            _fail(order, device.name, reply.text if isinstance(reply, NotReady) else text)
        elif isinstance(reply, Ready) and device.spawned_s != step.spawned_s:
            _succeed(order, device, _read_versions(device).get(order.task, ""), reply.load_s)

    def _warn_of_differences(self, device: DeviceProcess) -> None:
        if any(not order.is_over for order in self._orders.values()):
            return
        for task, version in _read_versions(device).items():
            for other in self._supervisor.devices:
                theirs = _read_versions(other).get(task, version)
                pair = frozenset((task, version, theirs))
                if theirs != version and pair not in self._told:
                    self._told.add(pair)
                    logger.warning(
                        "model %s: device %s serves version %s, and device %s version %s, as files"
                        " or settings have changed meanwhile; run `batchery reload %s`",
                        *(task, other.name, theirs, device.name, version, task),
                    )


def _needs_fresh(device: DeviceProcess) -> bool:
    """Whether a version needs a fresh process: where jobs have slots, or a device has parts."""
    return bool(device.setup.slots) or is_joint(device.setup.device)


def _serves(device: DeviceProcess, task: str) -> bool:
    return task in device.setup.load or task in _read_versions(device)


def _read_versions(device: DeviceProcess) -> dict[str, str]:
    """The versions that a device has reported of its models, by task; empty for those without."""
    models = device.reported.get("models", {})
    return {task: figures.get("version", "") for task, figures in models.items()}


def _own_settings(app: Celery, task: str) -> ModelSettings | None:
    """The settings of a model as they were when the worker started; None for a class of the app."""
    return cast(ModelTask, app.tasks[task]).model_settings


def _with_version(setup: Setup, task: str, settings: ModelSettings | None) -> Setup:
    if settings is None:
        return setup
    return replace(setup, versions={**setup.versions, task: settings})


def _succeed(order: ReloadOrder, device: DeviceProcess, version: str, load_s: float) -> None:
    step = order.devices[device.name]
    device.setup = _with_version(device.setup, order.task, order.settings)
    step.state, step.version, step.load_s = "reloaded", version, round(load_s, 3)
    logger.info(
        "model %s was reloaded on device %s in %.1f s, version %s after %s",
        *(order.task, device.name, load_s, version or "unnamed", step.before or "unnamed"),
    )


def _fail(order: ReloadOrder, device: str, why: str) -> None:
    step = order.devices[device]
    step.state, step.error = "failed", why
    logger.error(
        "model %s was not reloaded on device %s, and goes on as before: %s",
        *(order.task, device, why),
    )
