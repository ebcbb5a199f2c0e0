"""The batches that were launched on the device that this process is."""

from collections.abc import Callable

from batchery_worker.device_pool.clocks import BatchClocks
from batchery_worker.device_pool.process import DeviceProcess, RecyclingLimits
from batchery_worker.in_flight import DispatchedBatch
from batchery_worker.ipc.messages import Cancel, Done, RecycleDue, Reply, Running, Work


class Launches(BatchClocks):
    """Hands batches to the device, and tells the worker of those whose time is limited."""

    def __init__(
        self,
        device: DeviceProcess,
        limits: RecyclingLimits,
        out: Callable[[Work | Cancel], None],
        inform: Callable[[Reply], None],
        *,
        on_ready: Callable[[], None],
        on_done: Callable[[DispatchedBatch, Done, DeviceProcess], None],
    ) -> None:
        """Has launched none.

        Args:
            device: This process.
            limits: When it is recycled.
            out: Takes a batch, or an order for one.
            inform: Tells the worker, which kills a device whose batch takes too long.
            on_ready: Called when the device can take batches.
            on_done: Called when it has finished one.
        """
        super().__init__([device], on_ready)
        self._limits = limits
        self._out = out
        self._inform = inform
        self._on_done = on_done
        #: Batches with suspects of an earlier worker: no other job may run.
        self._reserved = 0
        self.handlers[Done] = self._take

    @property
    def is_reserved(self) -> bool:
        """Whether jobs run that may kill the process: then no other job may run."""
        return self._reserved > 0

    def send(self, device: DeviceProcess, work: Work, dispatched: DispatchedBatch) -> None:
        """Hands a batch to the device."""
        self._reserved += dispatched.is_reserved
        device.hold(work.id, dispatched)
        if work.is_timed:
            self._inform(describe_running(work, dispatched))
        if dispatched.in_slots:
            self._begin(device, dispatched)
        elif device.in_turn == [dispatched]:
            self._watch(device)
        self._out(work)

    def cancel(self, work_id: int, dispatched: DispatchedBatch) -> None:
        """Lets a batch end that nobody wants; the worker kills the process if that takes long."""
        if dispatched.in_slots:
            self._out(Cancel(work_id))
        dispatched.is_unwanted = True
        jobs = dispatched.batch.jobs
        self._inform(
            Running(work_id, jobs[0].key.task, [job.id for job in jobs], None, is_unwanted=True)
        )

    def _take(self, device: DeviceProcess, done: Done) -> None:
        """Takes back a batch that the device has answered."""
        dispatched = device.take_reply(done)
        self._reserved -= dispatched.is_reserved
        self._give_time_back(device, dispatched)
        if not device.recycle_due and self._limits.reached(device.jobs, device.pid):
            device.recycle_due = True
            self._inform(RecycleDue(device.jobs))
        if not dispatched.in_slots:
            self._watch(device)
        self._on_done(dispatched, done, device)


def describe_running(work: Work, dispatched: DispatchedBatch) -> Running:
    """What the worker must know of a batch whose time is limited."""
    return Running(
        work.id,
        work.task,
        [job.id for job in dispatched.batch.jobs],
        dispatched.hard_limit_s,
        is_urgent=dispatched.urgent,
        in_slots=dispatched.in_slots,
        items=dispatched.batch.items,
        is_alone=dispatched.batch.alone,
    )
