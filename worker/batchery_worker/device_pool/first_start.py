"""The first start of a worker's devices: what people are told of it, and when it has failed."""

import logging
from collections.abc import Sequence
from time import monotonic

from batchery_worker.device_pool.process import DeviceProcess, State

logger = logging.getLogger("batchery.pool")

#: Number of failed starts in a row that end the worker; one may be an accident.
MAX_FIRST_STARTS = 2


class FirstStart:
    """It goes on until all devices have been ready together once.

    People see its lines at Celery's default level, where silence looks like a fault.
    """

    def __init__(self, devices: Sequence[DeviceProcess]) -> None:
        self._devices = devices
        self._began_s: float | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it has begun, and some device is not ready yet."""
        return self._began_s is not None

    def begin(self) -> None:
        """Says which models are loaded."""
        self._began_s = monotonic()
        models = dict.fromkeys(name for device in self._devices for name in device.setup.load)
        if models:
            names = ", ".join(device.name for device in self._devices)
            logger.warning("loading %s on %s; their jobs wait", ", ".join(models), names)

    def look(self) -> None:
        """Says that models are ready, once all devices are."""
        if self._began_s is None or any(each.state is not State.READY for each in self._devices):
            return
        took_s, self._began_s = monotonic() - self._began_s, None
        if any(device.setup.load for device in self._devices):
            logger.warning("models are ready after %.1f s", took_s)

    def find_death(self) -> str:
        """Why the worker must end, for people: a device has died too often; else empty."""
        for device in self._devices:
            if self.goes_on and not device.ready_s and device.failed_starts >= MAX_FIRST_STARTS:
                return (
                    f"device process for {device.name} died while it started,"
                    f" {MAX_FIRST_STARTS} times; its error output is above"
                )
        return ""
