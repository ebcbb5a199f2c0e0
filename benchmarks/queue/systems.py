"""What the queue benchmark compares: the same no-op job, and how each system's worker starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CELERY = ("-m", "celery", "-A")
TASKIQ = ("-m", "taskiq", "worker")
WORKER = ("worker", "-l", "ERROR", "--without-mingle", "--without-gossip")


#: Reads Redis's answers for redis-py, as it does for Batchery and for Celery as it is.
HIREDIS = "hiredis==3.5.0"


@dataclass(frozen=True, slots=True)
class System:
    """One row."""

    name: str
    #: Module in peers that fills the queue and makes single calls.
    module: str
    #: Arguments of Python that start its worker; `{url}` is the address of Redis.
    worker: Sequence[str]
    #: Packages of its own environment, pinned; none means this one.
    requirements: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Jobs per round, as a multiple of what was asked for: all shall take seconds, not minutes.
    weight: float = 1.0
    #: Keys with an expiry that a finished job leaves behind.
    keys_per_job: int = 1
    #: Whether single calls are measured, too.
    has_latency: bool = True


def batchery(name: str, *options: str) -> System:
    """A row of ours."""
    return System(
        name,
        "benchmarks.peers.batchery_tasks",
        (*CELERY, "benchmarks.peers.batchery_tasks", *WORKER, *options),
        weight=5.0,
        has_latency="-E" not in options,
    )


def celery(name: str, *options: str) -> System:
    """A row of Celery as it is."""
    return System(
        name,
        "benchmarks.peers.celery_stock",
        (*CELERY, "benchmarks.peers.celery_stock", *WORKER, *options),
    )


def raw(batch: int) -> System:
    """A row of Redis's own."""
    return System(
        f"Redis alone, {batch} at a time",
        "benchmarks.peers.raw_redis",
        ("-m", "benchmarks.peers.raw_redis", "work"),
        environment={"PEER_BATCH": str(batch)},
        weight=20.0,
        has_latency=False,
    )


def dramatiq(name: str, processes: int) -> System:
    """A row of Dramatiq."""
    peer = "benchmarks.peers.dramatiq_actors"
    worker = ("-m", "dramatiq", peer, "--processes", str(processes), "--threads", "8")
    return System(name, peer, worker, (HIREDIS, "dramatiq[redis]==2.2.1"))


def saq(name: str, processes: int) -> System:
    """A row of SAQ."""
    peer = "benchmarks.peers.saq_tasks"
    worker = ("-m", "saq", f"{peer}.settings", "--workers", str(processes))
    # It needs typing_extensions and does not say so.
    needs = (HIREDIS, "typing_extensions==4.16.0", "saq[redis]==0.26.4")
    return System(name, peer, worker, needs)


def taskiq(name: str, processes: int) -> System:
    """A row of taskiq."""
    peer = "benchmarks.peers.taskiq_tasks"
    worker = (*TASKIQ, f"{peer}:broker", "--workers", str(processes), "--log-level", "ERROR")
    # It runs on uvloop where that is installed.
    needs = (HIREDIS, "uvloop==0.23.0", "taskiq-redis==1.2.4", "taskiq==0.13.0")
    return System(name, peer, worker, needs)


OTHERS = (
    System(
        "celery-batches 0.11",
        "benchmarks.peers.celery_batches_tasks",
        (*CELERY, "benchmarks.peers.celery_batches_tasks", *WORKER, "-P", "solo"),
        (HIREDIS, "celery[redis]==5.6.3", "celery-batches==0.11"),
    ),
    dramatiq("Dramatiq 2.2", 1),
    # As many processes as Batchery has, whose device is one of its own.
    dramatiq("Dramatiq 2.2, 2 processes", 2),
    saq("SAQ 0.26", 1),
    saq("SAQ 0.26, 2 processes", 2),
    taskiq("taskiq 0.13", 1),
    taskiq("taskiq 0.13, 2 processes", 2),
    System(
        "RQ 3.0",
        "benchmarks.peers.rq_jobs",
        ("-m", "rq.cli", "worker", "--quiet", "--url", "{url}"),
        (HIREDIS, "rq==3.0.0"),
        weight=0.1,
        keys_per_job=2,
    ),
    System(
        "RQ 3.0 SimpleWorker",
        "benchmarks.peers.rq_jobs",
        ("-m", "rq.cli", "worker", "--quiet", "--url", "{url}", "-w", "rq.SimpleWorker"),
        (HIREDIS, "rq==3.0.0"),
        weight=0.5,
        keys_per_job=2,
    ),
)


def systems() -> list[System]:
    """All rows."""
    return [
        batchery("batchery"),
        batchery("batchery, with events", "-E"),
        celery("celery solo", "-P", "solo"),
        celery("celery threads -c 4", "-P", "threads", "-c", "4"),
        celery("celery prefork -c 2", "-P", "prefork", "-c", "2"),
        *OTHERS,
        raw(64),
        raw(256),
    ]
