"""Other versions of models, which people order while a worker runs.

Whoever has ordered one asks again until it is over.
"""

import logging
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from batchery.device_names import is_joint
from batchery_worker.device_pool.fleet import Fleet
from batchery_worker.device_pool.process import DeviceProcess, State

logger = logging.getLogger("batchery.pool")


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
    """A fresh process for all devices that serve a model."""

    task: str
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

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._orders: dict[str, ReloadOrder] = {}
        #: Held by the order that is carried out.
        self._turn = threading.Lock()

    @property
    def _devices(self) -> dict[str, DeviceProcess]:
        """All devices, those that were given up among them."""
        return {each.name: each for each in (*self._fleet.devices, *self._fleet.given_up)}

    def begin(self, number: str, task: str) -> dict[str, Any]:
        """Begins an order, unless it has begun; says how far it is.

        Args:
            number: Made by whoever orders; the same each time that it asks.
            task: Name of the model.
        """
        if (order := self._orders.get(number)) is None:
            order = self._orders[number] = self._plan(task)
            threading.Thread(target=self._carry_out, args=(order,), daemon=True).start()
        return order.report()

    def _plan(self, task: str) -> ReloadOrder:
        """Chooses the devices."""
        setups = {
            name: each.setup
            for name, each in self._devices.items()
            if task in each.setup.load or task in each.versions
        }
        if any(each.task or is_joint(each.device) for each in setups.values()):
            why = "has processes of its own, or lies on several devices"
            return ReloadOrder(task, error=f"model {task!r}: {why}; restart the worker")
        return ReloadOrder(task, {name: DeviceReload() for name in setups})

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
        fresh = DeviceProcess(replace(device.setup, reloaded=task), device.start)
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


def _fail(step: DeviceReload, order: ReloadOrder, device: str, why: str) -> None:
    step.state, step.error = "failed", why
    logger.error(
        "model %s was not reloaded on device %s, and goes on as before: %s",
        *(order.task, device, why),
    )
