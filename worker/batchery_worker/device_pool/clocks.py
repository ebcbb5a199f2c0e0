"""The clocks of batches: when each began, and how much of its time counts.

A worker watches by them what its devices tell it of; each device has them for its own batches.
"""

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Any

from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.in_flight import DispatchedBatch
from batchery_worker.ipc.messages import Began, Left, Loaded, Loads, Reply, ResultsWait

#: After so much time a job that had to leave its slots has its process killed, in seconds, as has a
#: batch whose jobs were all terminated: it may hang. Most end by themselves, which costs no load.
MAX_STEP_S = 10.0


class BatchClocks:
    """Knows what is on devices; for one thread."""

    def __init__(self, devices: Sequence[DeviceProcess], on_ready: Callable[[], None]) -> None:
        """Of devices that have no batches.

        Args:
            devices: None of them has been started.
            on_ready: Called when a device can take batches.
        """
        self.devices = list(devices)
        self.on_ready = on_ready
        #: How long a load may take, or a device to start, in seconds; 0 while the worker starts.
        self._start_timeout_s = 0.0
        #: What handles a message of a device, by its kind.
        self.handlers: dict[type[Any], Callable[[DeviceProcess, Any], None]] = {
            Began: self._on_begin,
            Left: self._on_left,
            Loads: self._on_load,
            Loaded: self._on_load,
            ResultsWait: self._on_wait,
        }

    def receive(self, device: DeviceProcess, reply: Reply) -> None:
        """Handles a message of a device."""
        if (handle := self.handlers.get(type(reply))) is not None:
            handle(device, reply)

    def _watch_limit(self, device: DeviceProcess, dispatched: DispatchedBatch) -> None:
        """Called whenever it is known anew when a batch is due."""

    @property
    def dispatched(self) -> int:
        """Number of batches on all devices together."""
        return sum(len(device.batches) for device in self.devices)

    def _watch(self, device: DeviceProcess) -> None:
        """Starts the clock of the first batch, and its hard limit; the one behind has not begun."""
        for dispatched in device.batches.values():
            if dispatched.urgent or dispatched.in_slots:
                # The clock of an urgent one runs only once the device has said so.
                self._watch_limit(device, dispatched)
                continue
            self._begin(device, dispatched)
            break

    def _begin(self, device: DeviceProcess, dispatched: DispatchedBatch) -> None:
        # Set only once: this runs again after a reconnect, which must not extend the time.
        if dispatched.began_s is None:
            dispatched.began_s = monotonic()
        self._watch_limit(device, dispatched)

    def _on_begin(self, device: DeviceProcess, reply: Began) -> None:
        self._begin(device, device.batches[reply.id])
        # The next urgent one can be prepared meanwhile.
        self.on_ready()

    def _on_left(self, device: DeviceProcess, reply: Left) -> None:
        device.free_slot(reply)
        self.on_ready()

    def _on_load(self, device: DeviceProcess, reply: Loads | Loaded) -> None:
        """Keeps the time of a load out of the time of its batch, which begins after that."""
        dispatched, now_s = device.batches[reply.id], monotonic()
        if isinstance(reply, Loads):
            # A load has as much time as a start.
            dispatched.excused_until_s = now_s + self._start_timeout_s
            dispatched.excused_since_s, dispatched.began_s = now_s, now_s + reply.expected_s
            self._watch_limit(device, dispatched)
            return
        dispatched.excused_until_s = 0.0
        dispatched.load_s, dispatched.began_s = now_s - dispatched.excused_since_s, now_s
        self._watch_limit(device, dispatched)

    def _on_wait(self, device: DeviceProcess, reply: ResultsWait) -> None:
        """Keeps the time in which Redis may be away out of the time of a batch."""
        dispatched, now_s = device.batches[reply.id], monotonic()
        if not reply.is_over:
            dispatched.excused_until_s, dispatched.excused_since_s = inf, now_s
            return
        dispatched.excused_until_s = 0.0
        if dispatched.began_s is not None:
            dispatched.began_s += now_s - max(dispatched.began_s, dispatched.excused_since_s)
            self._watch_limit(device, dispatched)

    def _give_time_back(self, device: DeviceProcess, ended: DispatchedBatch) -> None:
        """The time of an urgent batch does not count for the batch that it has interrupted."""
        if not ended.urgent or ended.began_s is None:
            return
        for dispatched in device.in_turn:
            if dispatched.began_s is not None:
                dispatched.began_s += monotonic() - max(ended.began_s, dispatched.began_s)
