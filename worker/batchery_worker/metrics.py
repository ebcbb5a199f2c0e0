"""Counts what the batches of a worker looked like."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from batchery_worker.wire import Done

#: Where a batch spends its time on a device, in order, as `Done` has it; `queued_ms` is the time
#: between the other three.
STAGES = ("prepare_ms", "queued_ms", "forward_ms", "commit_ms")


@dataclass(slots=True)
class Metrics:
    """Sums over all batches since the worker started; `celery inspect stats` shows them."""

    batches: int = 0
    jobs: int = 0
    items: int = 0
    failed_jobs: int = 0
    #: Jobs whose result a device stored itself; the others took the longer way, by Celery's tracer.
    committed_jobs: int = 0
    #: Jobs whose outcome was dropped, as another worker has them now.
    fenced_jobs: int = 0
    waited_ms: float = 0.0
    prepare_ms: float = 0.0
    queued_ms: float = 0.0
    forward_ms: float = 0.0
    commit_ms: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    device_restarts: int = 0
    #: How many batches had how many items, by the next power of two.
    sizes: Counter[int] = field(default_factory=Counter)

    def batch_done(self, done: Done, *, items: int, waited_ms: float) -> None:
        """Counts one batch.

        Args:
            done: What the device said of it.
            items: Items in it.
            waited_ms: Sum over its jobs of the time from arrival in the worker to dispatch.
        """
        self.batches += 1
        self.jobs += len(done.jobs)
        self.items += items
        self.waited_ms += waited_ms
        for stage in STAGES:
            setattr(self, stage, getattr(self, stage) + getattr(done, stage))
        self.tokens += done.tokens
        self.computed_tokens += done.computed_tokens
        self.sizes[1 << (items - 1).bit_length()] += 1

    def snapshot(self) -> dict[str, Any]:
        """The sums, and the means that they give; means are None before the first batch.

        The sums are there so that two snapshots give the means of the time between them.
        """

        def mean(total: float, count: int) -> float | None:
            return round(total / count, 3) if count else None

        waste = mean(self.computed_tokens - self.tokens, self.computed_tokens)
        return {
            "batches": self.batches,
            "jobs": self.jobs,
            "items": self.items,
            "failed_jobs": self.failed_jobs,
            "committed_jobs": self.committed_jobs,
            "fenced_jobs": self.fenced_jobs,
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
        }
