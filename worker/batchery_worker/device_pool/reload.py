"""Other versions of models, which people order while a worker runs.

Whoever has ordered one asks again until it is over.
"""

import logging
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

from celery import Celery

from batchery.device_names import is_joint
from batchery.errors import SettingsError, StartError
from batchery.installation import get_installation
from batchery.model_task import ModelTask
from batchery.settings import ModelSettings
from batchery_worker.device_pool.fleet import Fleet
from batchery_worker.device_pool.process import DeviceProcess, State
from batchery_worker.ipc.messages import Reload, Setup

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
        devices = {name: asdict(each) for name, each in self.devices.items()}
        return {"devices": devices, "is_over": self.is_over, "error": self.error}


class Reloads:
    """Carries out orders, one after the other, and each on one device after the other."""

    def __init__(self, app: Celery, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet
        self._orders: dict[str, ReloadOrder] = {}
        #: Held by the order that is carried out.
        self._turn = threading.Lock()

    @property
    def _devices(self) -> dict[str, DeviceProcess]:
        """All devices, those that were given up among them."""
        return {each.name: each for each in (*self._fleet.devices, *self._fleet.given_up)}

    def begin(self, number: str, task: str, **options: Any) -> dict[str, Any]:
        """Begins an order, unless it has begun; says how far it is.

        Args:
            number: Made by whoever orders; the same each time that it asks.
            task: Name of the model.
            options: See `_plan`.
        """
        if (order := self._orders.get(number)) is None:
            try:
                order = self._plan(task, **options)
            except StartError as error:
                order = ReloadOrder(task, error=str(error))
            self._orders[number] = order
            for old in list(self._orders)[:-MAX_ORDERS]:
                if self._orders[old].is_over:
                    del self._orders[old]
            threading.Thread(target=self._carry_out, args=(order,), daemon=True).start()
        return order.report()

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
        devices = {
            device: DeviceReload()
            for device, each in self._devices.items()
            if name in each.setup.load or name in each.versions
        }
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
        return ReloadOrder(name, settings, force, devices)

    def _carry_out(self, order: ReloadOrder) -> None:
        with self._turn, self._fleet.changed:
            devices = self._devices
            for name, step in order.devices.items():
                if any(each.state == "failed" for each in order.devices.values()):
                    _fail(step, order, name, "not tried, as another device failed")
                while step.state in ("waiting", "loading"):
                    self._reload(order, devices[name], step)

    def _reload(self, order: ReloadOrder, device: DeviceProcess, step: DeviceReload) -> None:
        """Has a device load the version; it must be asked again if it is recycled meanwhile."""
        ended = State.READY, State.GIVEN_UP
        self._fleet.changed.wait_for(lambda: device.state in ended)
        if device.state is State.GIVEN_UP:
            step.state = "reloaded"  # It never starts again.
            return
        step.state = "loading"
        step.before = device.versions.get(order.task, "")
        if order.task not in device.setup.versions:
            # The settings may have changed: a process that starts anew must load the old version.
            own = _own_settings(self._app, order.task)
            device.setup = _with_version(device.setup, order.task, own)
        # Where jobs have slots, or a device has parts, a version needs a fresh process.
        is_fresh = device.setup.slots or is_joint(device.setup.device)
        (self._renew if is_fresh else self._swap)(order, device, step)

    def _swap(self, order: ReloadOrder, device: DeviceProcess, step: DeviceReload) -> None:
        """Of a device that loads the version beside the old one."""
        fleet, pipe = self._fleet, device.pipe
        device.reloaded = None
        device.tell(Reload(order.task, order.settings, order.force))
        fleet.changed.wait_for(
            lambda: device.reloaded or device.state is not State.READY or device.pipe is not pipe,
            fleet.start_timeout_s,
        )
        if (answer := device.reloaded) is not None:
            if answer.error:
                _fail(step, order, device.name, answer.error)
            else:
                _succeed(step, order, device, answer.version, answer.load_s)
        elif device.pipe is not pipe:
            _fail(step, order, device.name, "its process ended while it loaded the new version")
        elif device.state is State.READY:
            why = "it was not loaded within device_start_timeout_s"
            _fail(step, order, device.name, why)
            # With the load that hangs ends the process that might yet serve it.
            fleet.renew(device)

    def _renew(self, order: ReloadOrder, device: DeviceProcess, step: DeviceReload) -> None:
        """Of a device that gets a fresh process."""
        previous, spawned_s = device.setup.versions.get(order.task), device.spawned_s
        device.setup = _with_version(device.setup, order.task, order.settings)
        self._fleet.renew(device)
        self._fleet.changed.wait_for(
            lambda: (
                device.spawned_s != spawned_s
                and (device.state is State.READY or device.failed_starts > 0)
            )
        )
        if device.failed_starts:
            # What it starts next has the old version.
            device.setup = _with_version(device.setup, order.task, previous)
            why = device.error or "its fresh process ended while it started"
            _fail(step, order, device.name, why)
        else:
            version = device.versions.get(order.task, "")
            _succeed(step, order, device, version, device.load_s)


def _own_settings(app: Celery, task: str) -> ModelSettings | None:
    """The settings of a model as they were when the worker started; None for a class of the app."""
    return cast(ModelTask, app.tasks[task]).model_settings


def _with_version(setup: Setup, task: str, settings: ModelSettings | None) -> Setup:
    if settings is None:
        return setup
    return replace(setup, versions={**setup.versions, task: settings})


def _succeed(
    step: DeviceReload, order: ReloadOrder, device: DeviceProcess, version: str, load_s: float
) -> None:
    device.setup = _with_version(device.setup, order.task, order.settings)
    step.state, step.version, step.load_s = "reloaded", version, round(load_s, 3)
    logger.info(
        "model %s was reloaded on device %s in %.1f s, version %s after %s",
        *(order.task, device.name, load_s, version or "unnamed", step.before or "unnamed"),
    )


def _fail(step: DeviceReload, order: ReloadOrder, device: str, why: str) -> None:
    step.state, step.error = "failed", why
    logger.error(
        "model %s was not reloaded on device %s, and goes on as before: %s",
        *(order.task, device, why),
    )
