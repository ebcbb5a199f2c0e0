"""Counts what the batches of a worker looked like."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


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
    forward_ms: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    device_restarts: int = 0
    #: How many batches had how many items, by the next power of two.
    sizes: Counter[int] = field(default_factory=Counter)

    def batch_done(
        self, *, jobs: int, items: int, waited_ms: float, forward_ms: float, tokens: tuple[int, int]
    ) -> None:
        """Counts one batch.

        Args:
            jobs: Messages in it.
            items: Items in it.
            waited_ms: Sum over its jobs of the time from arrival in the worker to dispatch.
            forward_ms: Time that the device computed.
            tokens: Tokens of the items, and tokens computed with padding.
        """
        self.batches += 1
        self.jobs += jobs
        self.items += items
        self.waited_ms += waited_ms
        self.forward_ms += forward_ms
        self.tokens += tokens[0]
        self.computed_tokens += tokens[1]
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
            "forward_ms": round(self.forward_ms, 3),
            "mean_batch_size": mean(self.items, self.batches),
            "mean_waited_ms": mean(self.waited_ms, self.jobs),
            "mean_forward_ms": mean(self.forward_ms, self.batches),
            "tokens": self.tokens,
            "computed_tokens": self.computed_tokens,
            "padding_waste": waste,
            "batch_sizes": {f"<={size}": count for size, count in sorted(self.sizes.items())},
        }
