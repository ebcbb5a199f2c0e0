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
from batchery_worker.ipc.messages import Setup

logger = logging.getLogger("batchery.pool")

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
            threading.Thread(target=self._carry_out, args=(order,), daemon=True).start()
        return order.report()

    def _plan(
        self, name: str, model: str | None = None, revision: str | None = None
    ) -> ReloadOrder:
        """Chooses the settings, and the devices.

        Args:
            name: Of the task.
            model: Folder or id on the hub; None for what the settings say now.
            revision: Of the model; None for what the settings say, if they name the model.

        Raises:
            SettingsError: They are wrong, or the model must not change so much while it runs, or a
                device has no memory for it twice.
        """
        setups = {
            device: each.setup
            for device, each in self._devices.items()
            if name in each.setup.load or name in each.versions
        }
        if not setups:
            return ReloadOrder(name)
        if any(each.slots or is_joint(each.device) for each in setups.values()):
            raise SettingsError(
                f"model {name!r}: has slots, or lies on several devices, and takes the memory that"
                " there is; restart the worker"
            )
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
        return ReloadOrder(name, settings, {device: DeviceReload() for device in setups})

    def _carry_out(self, order: ReloadOrder) -> None:
        with self._turn, self._fleet.changed:
            devices = self._devices
            for name, step in order.devices.items():
                if any(each.state == "failed" for each in order.devices.values()):
                    _fail(step, order, name, "not tried, as another device failed")
                else:
                    self._reload(order, devices[name], step)

    def _reload(self, order: ReloadOrder, device: DeviceProcess, step: DeviceReload) -> None:
        """Starts a process with the version beside that of a device, and puts it in its place."""
        fleet, task = self._fleet, order.task
        fleet.changed.wait_for(lambda: all(each.state is State.READY for each in fleet.devices))
        if device not in fleet.devices:
            step.state = "reloaded"  # It was given up, and never starts again.
            return
        step.state, step.before = "loading", device.versions.get(task, "")
        if task not in device.setup.versions:
            # The settings may have changed: a process that starts anew must load the old version.
            device.setup = _with_version(device.setup, task, _own_settings(self._app, task))
        setup = _with_version(device.setup, task, order.settings)
        fresh = DeviceProcess(replace(setup, reloaded=task), device.start)
        fleet.start_beside(fresh)
        fleet.changed.wait_for(lambda: fresh.state is State.READY or fresh not in fleet.beside)
        if fresh not in fleet.beside:
            _fail(step, order, device.name, fresh.error)
            return
        fleet.replace(device, fresh)
        fleet.changed.wait_for(lambda: device not in fleet.beside)
        step.state, step.version = "reloaded", fresh.versions.get(task, "")
        step.load_s = round(fresh.load_s, 3)
        logger.info(
            "model %s was reloaded on device %s in %.1f s, version %s after %s",
            *(task, fresh.name, fresh.load_s, step.version or "unnamed", step.before or "unnamed"),
        )


def _own_settings(app: Celery, task: str) -> ModelSettings | None:
    """The settings of a model as they were when the worker started; None for a class of the app."""
    return cast(ModelTask, app.tasks[task]).model_settings


def _with_version(setup: Setup, task: str, settings: ModelSettings | None) -> Setup:
    if settings is None:
        return setup
    return replace(setup, versions={**setup.versions, task: settings})


def _fail(step: DeviceReload, order: ReloadOrder, device: str, why: str) -> None:
    step.state, step.error = "failed", why
    logger.error(
        "model %s was not reloaded on device %s, and goes on as before: %s",
        *(order.task, device, why),
    )
