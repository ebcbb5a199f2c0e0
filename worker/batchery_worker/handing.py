"""Jobs that Celery's consumer hands over to devices: of brokers other than Redis, and in tests.

A message stays with its broker until its device has settled it. Here is known which device has
which message, so that another one gets what a dead device had.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

from celery.utils.collections import LimitedSet
from celery.worker import state as worker_state
from celery.worker.strategy import default

from batchery.transport.suspects import Deaths
from batchery_worker.device_pool.fleet import Fleet, Holding
from batchery_worker.device_pool.process import DeviceProcess, State
from batchery_worker.device_pool.watched import WatchedBatch
from batchery_worker.forwarding import read_raw
from batchery_worker.ipc.messages import Fate, Forget, Handed, Ready, Reply, Settled

logger = logging.getLogger("batchery.pool")


@dataclass(slots=True, eq=False)
class HandedJob:
    """One message that is not settled."""

    message: Any
    #: What says which job it is: its headers, or in Celery's first protocol its body.
    headers: InitVar[Mapping[str, Any]]
    task: Any
    #: That of Celery which has brought it.
    consumer: Any
    token: str = field(default_factory=partial(next, map(str, itertools.count(1))))
    #: None while no device is ready that serves its task.
    device: DeviceProcess | None = None
    #: What is known of devices that died while they ran it.
    deaths: Deaths | None = None
    #: The hard time limit that it has reached, in seconds.
    expired_s: float | None = None
    #: Whether its connection is lost, so that the broker will deliver it again.
    is_stale: bool = False
    #: Its id, and which attempt this is: a retry keeps the id.
    run: tuple[str, str] = field(init=False)
    #: When it may begin; nothing for at once.
    eta: Any = field(init=False)

    def __post_init__(self, headers: Mapping[str, Any]) -> None:
        # Nobody has checked them yet.
        self.run = str(headers.get("id")), str(headers.get("retries"))
        self.eta = headers.get("eta")

    def settle(self, fate: str) -> None:
        """Tells the broker what becomes of the message, on the thread that Celery has for that."""
        if self.consumer.hub:
            self.consumer.call_soon(self._settle, fate)
        else:
            # As Celery's pools of threads do.
            self._settle(fate)

    def _settle(self, fate: str) -> None:
        errors = self.consumer.connection_errors
        try:
            if fate == Fate.ACKNOWLEDGED:
                self.message.ack_log_error(logger, errors)
            else:
                self.message.reject_log_error(logger, errors, fate == Fate.REQUEUED)
            if self.eta:
                self.consumer.qos.decrement_eventually()
            self.consumer._restore_prefetch_count_after_connection_restart(None)
        except Exception as error:  # noqa: BLE001 - out of Celery's loop it would end the worker
            # The connection is gone, and the broker will deliver the message again.
            logger.warning("a message cannot be acknowledged any more: %r", error)


class HandedJobs(Holding):
    """The messages that the devices of a worker have; for whoever has the lock of the fleet.

    The broker gives back what was not settled.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._jobs: dict[str, HandedJob] = {}
        #: Attempts that were settled lately: the broker may deliver them again.
        self._settled = LimitedSet(maxlen=worker_state.SUCCESSFUL_MAX)
        self._connection: Any = None

    # What Celery's consumer says, on its thread

    def connect(self, connection: Any) -> None:
        """Notes which connection is used; what came by another one comes again."""
        before, self._connection = self._connection, connection
        if before is not None and before is not connection:
            self._fleet.call(self._forget_waiting)

    def hand_over(self, job: HandedJob) -> None:
        """Takes a message."""
        self._fleet.call(partial(self._take, job))

    # For whoever has the lock of the fleet

    def handle(self, device: DeviceProcess, reply: Reply) -> None:  # noqa: ARG002
        """Hears what a device says: that it is ready, or done with a job."""
        if isinstance(reply, Ready):
            self._assign_waiting()
        elif isinstance(reply, Settled):
            self._on_settled(reply)

    def _take(self, job: HandedJob) -> None:
        if (job.message.delivery_info or {}).get("redelivered"):
            run = job.run
            if run in self._settled:
                # Only the acknowledgement was lost with the connection.
                job.settle(Fate.ACKNOWLEDGED)
                return
            for older in self._jobs.values():
                if older.run == run:
                    logger.info(
                        "%s[%s] was redelivered while it runs, and goes on", job.task.name, run[0]
                    )
                    older.message, older.is_stale = job.message, False
                    return
        self._jobs[job.token] = job
        self._assign(job)

    def _assign(self, job: HandedJob) -> None:
        """Hands a message to the device that has fewest, among those that are ready."""
        devices = self._fleet.devices
        # Any refuses what none of them serves.
        able = [each for each in devices if each.setup.serves(job.task.name)] or devices
        ready = [each for each in able if each.state is State.READY]
        held = Counter(each.device.name for each in self._jobs.values() if each.device)
        job.device = min(ready, key=lambda each: held[each.name], default=None)
        if job.device is not None:
            handed = Handed(job.token, read_raw(job.message), job.deaths, job.expired_s)
            job.device.tell(handed)

    def _assign_waiting(self) -> None:
        for job in [*self._jobs.values()]:
            if job.device is None:
                self._assign(job)

    def _on_settled(self, reply: Settled) -> None:
        job = self._jobs.get(reply.token)
        if job is None:
            return
        job.device = None
        if reply.fate != Fate.FORGOTTEN:
            del self._jobs[reply.token]
            if reply.fate == Fate.ACKNOWLEDGED:
                self._settled.add(job.run)
            if not job.is_stale:
                job.settle(reply.fate)
        elif job.is_stale:
            del self._jobs[reply.token]
        else:
            # It has come again meanwhile.
            self._assign(job)

    def _forget_waiting(self) -> None:
        for job in [*self._jobs.values()]:
            job.is_stale = True
            if job.device is None:
                del self._jobs[job.token]
        for device in self._fleet.devices:
            device.tell(Forget())

    def leave(
        self, device: DeviceProcess, batches: Sequence[WatchedBatch], *, is_death: bool
    ) -> None:
        """Hands on what a device had."""
        jobs = [job for job in self._jobs.values() if job.device is device]
        if is_death:
            self._blame(jobs, batches)
        for job in jobs:
            job.device = None
            if job.is_stale:
                del self._jobs[job.token]
        self._assign_waiting()

    def _blame(self, jobs: Sequence[HandedJob], batches: Sequence[WatchedBatch]) -> None:
        """Notes what a death says of the jobs that ran; the same is in `recover.lua`."""
        in_slots = sum(each.told.in_slots for each in batches)
        for batch in batches:
            ran = [job for job in jobs if job.run[0] in batch.told.job_ids]
            size = in_slots if batch.told.in_slots else len(ran)
            for job in ran:
                if batch.was_too_long:
                    job.expired_s = batch.told.hard_limit_s or 0.0
                known, alone = job.deaths, job.deaths.alone if job.deaths else 0
                if batch.told.is_alone and len(batches) == 1:
                    job.deaths = Deaths(alone + 1)
                else:
                    job.deaths = Deaths(alone, size if known is None and size > 1 else 0)


def hand_over(task: Any, app: Any, consumer: Any, **_: Any) -> Callable[..., None]:
    """Celery's strategy of a batch task: its messages go to the worker's devices."""
    fleet = getattr(consumer.controller, "fleet", None)
    if fleet is None:
        # The consumer is that of a device on a thread of this process.
        handle: Callable[..., None] = default(task, app, consumer)
        return handle
    jobs = fleet.holding
    jobs.connect(consumer.connection)

    def hand(
        message: Any,
        body: Any,
        ack: Callable[..., Any],  # noqa: ARG001 - as Celery calls it
        reject: Callable[..., Any],  # noqa: ARG001
        callbacks: Any,
        **_: Any,
    ) -> None:
        job = HandedJob(message, message.headers if body is None else body, task, consumer)
        if job.eta:
            # Others need not wait behind it.
            consumer.qos.increment_eventually()
        jobs.hand_over(job)
        for callback in callbacks:
            callback(message)

    return hand
