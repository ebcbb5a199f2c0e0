"""Statistics of a worker's batches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchery.errors import counted
from batchery.protocol.figures import BatchFigures, BatchSums, CacheFigures
from batchery_worker.ipc.messages import Done

logger = logging.getLogger("batchery.pool")

#: Classes of errors that are counted each; there are few, unless somebody makes them as it goes.
MAX_REASONS = 50

#: Name of all others.
OTHER_REASONS = "others"


@dataclass(slots=True)
class Metrics(BatchFigures):
    """Counts since the worker started; `celery inspect stats` shows them."""

    #: Sums of the devices, by name.
    devices: dict[str, BatchSums] = field(default_factory=dict)

    def batch_done(self, done: Done, device: str, *, items: int, waited_ms: float) -> None:
        """Counts one batch, whose jobs together waited so long from arrival to dispatch."""
        for sums in (self, self.devices.setdefault(device, BatchSums())):
            sums.batches += 1
            sums.items += items
            sums.forward_ms += done.forward_ms
            sums.tokens += done.tokens
            sums.computed_tokens += done.computed_tokens
        for reason, count in (done.failed_items or {}).items():
            self.failed_items += count
            self._count_failure(reason, count)
        self.jobs += len(done.jobs)
        self.waited_ms += waited_ms
        self.prepare_ms += done.prepare_ms
        self.queued_ms += done.queued_ms
        self.commit_ms += done.commit_ms
        self.batch_sizes[f"<={1 << (items - 1).bit_length()}"] += 1

    def job_failed(self, reason: str) -> None:
        """Counts a job that failed; the reason is the class of its error."""
        self.failed_jobs += 1
        self._count_failure(reason, 1)

    def _count_failure(self, reason: str, count: int) -> None:
        known = reason in self.failures or len(self.failures) < MAX_REASONS
        self.failures[reason if known else OTHER_REASONS] += count

    def of_device(self, device: str) -> dict[str, Any]:
        """The sums of one device."""
        return self.devices.get(device, BatchSums()).report()

    def reused(self, task: str, reused: Mapping[str, Any]) -> None:
        """Counts how the items of one batch of a task with a cache got their outcomes.

        Args:
            task: Its name.
            reused: The device's figures, see `result_cache.py`.
        """
        cache = self.caches.setdefault(task, CacheFigures())
        for name, value in reused.items():
            is_last = name in ("results", "bytes", "error")
            setattr(cache, name, value if is_last else getattr(cache, name) + value)

    def snapshot(self) -> dict[str, Any]:
        """The sums and the means; means are None before the first batch.

        Two snapshots' sums give the means of the time between them.
        """
        report = self.report()
        del report["devices"]
        return report


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
