"""How large a run is, and how much goes wrong in it."""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

TransportName = Literal["batchery", "stock"]

#: Name of a transport -> what Celery is told.
TRANSPORTS: dict[TransportName, str] = {
    "batchery": "batchery.transport:Transport",
    # Not its scheme: `install` has put ours behind that.
    "stock": "kombu.transport.redis:Transport",
}

#: Most items of a batch.
BATCH = 16

#: The pools of the workers' ordinary tasks: the first that starts has processes, which are killed.
POOLS = ("prefork", "threads", "solo")

#: How much faster one worker is than jobs are submitted, with full batches: it is busy for most of
#: the time, so that faults hit something, and catches up after them.
HEADROOM = 3

#: Longest time of a batch, in seconds.
LONGEST_BATCH_S = 0.5

#: So many batches of tasks for each worker are open all the time in a calibration.
CALIBRATION_BATCHES = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a run depends on, besides the machine's speed."""

    transport: TransportName = "batchery"
    jobs: int = 1000
    seed: int = 0
    #: How many ordinary jobs there are beside those of batches: 1 for as many as usual, 0 for none.
    #: What stock Celery loses of them in a fault counts as well.
    ordinary: float = 1.0
    #: `kill -9` of a worker's main process; its devices die with it.
    kills: int = 3
    #: `kill -9` of a device process.
    device_kills: int = 3
    #: `kill -9` of a process of the prefork pool, which runs ordinary tasks.
    child_kills: int = 2
    #: SIGSTOP of a worker, SIGCONT after `stop_s`.
    stops: int = 1
    #: `kill -9` of redis-server, and its start on the same data.
    redis_restarts: int = 1
    #: All connections between workers and Redis are cut at once.
    cuts: int = 2
    #: Messages that are none.
    malformed: int = 8
    #: Redis at maxmemory, for `full_s`; meanwhile workers start and end.
    fills: int = 1
    #: A replica takes the place of Redis, which turns read-only and cuts its connections. On a
    #: cluster: of a primary that is killed.
    failovers: int = 1
    #: Batch jobs and results are on a Redis Cluster, apart from the broker.
    cluster: bool = False
    #: The broker is a RabbitMQ; batch jobs and results are on Redis. Every other batch job comes
    #: by way of the broker, as from clients without Batchery.
    rabbitmq: bool = False
    #: A shard of the cluster moves to another primary.
    moves: int = 0
    #: `kill -9` of RabbitMQ, and its start on the same data.
    broker_restarts: int = 0
    #: How often all of these faults come, one round after the other.
    rounds: int = 1
    #: Workers at the start; later between `min_workers` and `max_workers`, as the seed has it.
    workers: int = 2
    min_workers: int = 1
    max_workers: int = 3
    #: Workers that outlive the run: nothing kills their main process, and no scaling ends it.
    elders: int = 0
    #: How long a stopped worker stays so: beyond the lease expiry, so that others take its jobs.
    stop_s: float = 8.0
    #: How long Redis is full: longer than a worker takes to start.
    full_s: float = 5.0
    #: Mean time between two faults.
    gap_s: float = 1.5
    #: How long after the last fault and the last answer a job counts as stuck.
    patience_s: float = 60.0
    #: Part of what the workers can do that is submitted; `jobs` follows then from a calibration.
    load: float = 0.0
    #: How long results and dead letters are kept, in seconds; 0 for Celery's day, and for ever.
    keep_s: int = 0
    #: Time between two samples of memory, descriptors and keys; 0 for none.
    sample_s: float = 0.0

    def stretch(self, minutes: float) -> Self:
        """The plan with its faults so many times that jobs are submitted for at least so long."""
        rounds = math.ceil((minutes * 60 / self.gap_s - 2) / max(1, self.faults))
        return replace(self, rounds=self.rounds * rounds)

    @property
    def faults(self) -> int:
        """How often something goes wrong; malformed messages come beside it."""
        processes = self.kills + self.device_kills + self.child_kills + self.stops
        others = self.redis_restarts + self.cuts + self.fills + self.failovers
        apart = self.moves + self.broker_restarts
        return self.rounds * (processes + others + apart)

    @property
    def is_apart(self) -> bool:
        """Whether batch jobs are elsewhere than with the broker."""
        return self.cluster or self.rabbitmq

    @property
    def calibration_tasks(self) -> int:
        """How many tasks are open all the time while we see what the workers can do."""
        return CALIBRATION_BATCHES * BATCH * self.workers if self.load else 0

    @property
    def duration_s(self) -> float:
        """How long jobs are submitted: the faults, and one gap before and after them."""
        return (self.faults + 2) * self.gap_s

    @property
    def batch_s(self) -> float:
        """How long a batch takes."""
        if self.load:
            return LONGEST_BATCH_S
        return min(LONGEST_BATCH_S, BATCH * self.duration_s / (HEADROOM * max(1, self.jobs)))
