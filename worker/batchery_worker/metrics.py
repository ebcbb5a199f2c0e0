"""Statistics of a worker's batches."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from batchery.errors import counted
from batchery_worker.ipc.messages import Done

logger = logging.getLogger("batchery.pool")

#: The stages of a batch on a device, named as in `Done`; `queued_ms` is the time between the other
#: three.
STAGES = ("prepare_ms", "queued_ms", "forward_ms", "commit_ms")

#: Classes of errors that are counted each; there are few, unless somebody makes them as it goes.
MAX_REASONS = 50

#: Name of all others.
OTHER_REASONS = "others"


@dataclass(slots=True)
class CacheMetrics:
    """Counts of one task with a cache, since the worker started."""

    items: int = 0
    #: Items whose result was in Redis.
    hits: int = 0
    #: Items that shared the result of an equal item in the same or the previous batch.
    deduplicated: int = 0
    computed: int = 0
    #: Results that this worker evicted because the cache was full.
    evicted: int = 0
    #: Number of failed reads and writes, and the last error.
    errors: int = 0
    error: str = ""
    #: Size of the cache when something was last put into it.
    results: int = 0
    bytes: int = 0

    def count(self, reused: Mapping[str, Any]) -> None:
        """Counts one batch; `reused` are the device's figures, see `cache/single_flight.py`."""
        for name in ("items", "hits", "deduplicated", "computed", "evicted", "errors"):
            setattr(self, name, getattr(self, name) + reused.get(name, 0))
        for name in ("results", "bytes", "error"):
            setattr(self, name, reused.get(name, getattr(self, name)))

    def snapshot(self) -> dict[str, Any]:
        """The sums; `hit_rate` is the share of items that were not computed, None without items."""
        saved = self.hits + self.deduplicated
        return {
            **asdict(self),
            "hit_rate": round(saved / self.items, 4) if self.items else None,
        }


@dataclass(slots=True)
class DeviceMetrics:
    """Sums over the batches of one device, since the worker started."""

    batches: int = 0
    items: int = 0
    forward_ms: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0

    def count(self, done: Done, items: int) -> None:
        """Counts one batch."""
        self.batches += 1
        self.items += items
        self.forward_ms += done.forward_ms
        self.tokens += done.tokens
        self.computed_tokens += done.computed_tokens

    def snapshot(self) -> dict[str, Any]:
        """The sums."""
        return {**asdict(self), "forward_ms": round(self.forward_ms, 3)}


@dataclass(slots=True)
class Metrics:
    """Sums over all batches since the worker started; `celery inspect stats` shows them."""

    batches: int = 0
    jobs: int = 0
    items: int = 0
    failed_jobs: int = 0
    #: Jobs whose result a device stored itself; Celery's tracer completed the others.
    committed_jobs: int = 0
    #: Jobs whose outcome was dropped, because another worker has taken them over.
    fenced_jobs: int = 0
    #: Jobs that could not make their deadline, and were not begun.
    shed_jobs: int = 0
    waited_ms: float = 0.0
    prepare_ms: float = 0.0
    queued_ms: float = 0.0
    forward_ms: float = 0.0
    commit_ms: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    device_restarts: int = 0
    #: Number of batches by their number of items, rounded up to a power of two.
    sizes: Counter[int] = field(default_factory=Counter)
    #: Number of jobs that Celery's tracer completed, by reason.
    tracer_jobs: Counter[str] = field(default_factory=Counter)
    #: Counts of the caches, by task.
    caches: dict[str, CacheMetrics] = field(default_factory=dict)
    #: Sums of the devices, by name.
    devices: dict[str, DeviceMetrics] = field(default_factory=dict)
    #: Items of multi-item jobs that failed; their jobs did not.
    failed_items: int = 0
    #: Number of failed jobs and of these items, by class of the error.
    failures: Counter[str] = field(default_factory=Counter)

    def batch_done(self, done: Done, device: str, *, items: int, waited_ms: float) -> None:
        """Counts one batch, whose jobs together waited so long from arrival to dispatch."""
        self.devices.setdefault(device, DeviceMetrics()).count(done, items)
        for reason, count in (done.failed_items or {}).items():
            self.failed_items += count
            self._count_failure(reason, count)
        self.batches += 1
        self.jobs += len(done.jobs)
        self.items += items
        self.waited_ms += waited_ms
        for stage in STAGES:
            setattr(self, stage, getattr(self, stage) + getattr(done, stage))
        self.tokens += done.tokens
        self.computed_tokens += done.computed_tokens
        self.sizes[1 << (items - 1).bit_length()] += 1

    def job_failed(self, reason: str) -> None:
        """Counts a job that failed; the reason is the class of its error."""
        self.failed_jobs += 1
        self._count_failure(reason, 1)

    def _count_failure(self, reason: str, count: int) -> None:
        known = reason in self.failures or len(self.failures) < MAX_REASONS
        self.failures[reason if known else OTHER_REASONS] += count

    def of_device(self, device: str) -> dict[str, Any]:
        """The sums of one device."""
        return self.devices.get(device, DeviceMetrics()).snapshot()

    def reused(self, task: str, reused: Mapping[str, Any]) -> None:
        """Counts how the items of one batch of a task with a cache got their outcomes."""
        self.caches.setdefault(task, CacheMetrics()).count(reused)

    def snapshot(self) -> dict[str, Any]:
        """The sums and the means; means are None before the first batch.

        Two snapshots' sums give the means of the time between them.
        """

        def mean(total: float, count: int) -> float | None:
            return round(total / count, 3) if count else None

        waste = mean(self.computed_tokens - self.tokens, self.computed_tokens)
        return {
            "batches": self.batches,
            "jobs": self.jobs,
            "items": self.items,
            "failed_jobs": self.failed_jobs,
            "failed_items": self.failed_items,
            "failures": dict(self.failures.most_common()),
            "committed_jobs": self.committed_jobs,
            "fenced_jobs": self.fenced_jobs,
            "shed_jobs": self.shed_jobs,
            "device_restarts": self.device_restarts,
            "waited_ms": round(self.waited_ms, 3),
            **{stage: round(getattr(self, stage), 3) for stage in STAGES},
            "mean_batch_size": mean(self.items, self.batches),
            "mean_waited_ms": mean(self.waited_ms, self.jobs),
            **{f"mean_{stage}": mean(getattr(self, stage), self.batches) for stage in STAGES},
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            "padding_waste": waste,
            "batch_sizes": {f"<={size}": count for size, count in sorted(self.sizes.items())},
            "tracer_jobs": dict(self.tracer_jobs.most_common()),
            "caches": {task: cache.snapshot() for task, cache in sorted(self.caches.items())},
        }


def log_batch(task: str, info: Mapping[str, Any], *, tokens: int, waited_ms: float) -> None:
    """Logs one line about a batch.

    Args:
        task: Name of the task.
        info: What `batch_info` makes.
        tokens: Tokens of the items; 0 if the task counts none.
        waited_ms: How long the job that came first has waited.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    of_tokens = f", {tokens} tokens, padding {info['padding']:.1%}" if tokens else ""
    logger.info(
        "Batch %s of %s: %s%s, waited %.1f ms, forward %.1f ms on %s",
        info["id"],
        task,
        counted(info["size"], "item"),
        of_tokens,
        waited_ms,
        info["forward_ms"],
        info["device"],
    )
