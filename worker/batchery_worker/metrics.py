"""Statistics of a device's batches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any

from batchery.errors import DeadlineExceeded, counted
from batchery.protocol.figures import (
    SIZE_BOUNDS,
    WAIT_BOUNDS_S,
    BatchFigures,
    BatchSums,
    CacheFigures,
    TaskFigures,
    TextFigures,
    find_bound,
    report,
)
from batchery_worker.batch import DeviceBatch

logger = logging.getLogger("batchery.pool")

#: Classes of errors that are counted each; there are few, unless somebody makes them as it goes.
MAX_REASONS = 50

#: Name of all others.
OTHER_REASONS = "others"

#: Fields of the sums that are kept of each device.
SUMS = fields(BatchSums)

#: Called once a job, and so it is none of Python's own functions.
_get_status = itemgetter(0)


@dataclass(slots=True)
class Metrics(BatchFigures):
    """Counts since the device started; `celery inspect stats` shows them."""

    def batch_done(self, batch: DeviceBatch, items: int) -> None:
        """Counts one batch, which was answered.

        Args:
            batch: The batch.
            items: Items of all its jobs together.
        """
        task = batch.work.task
        waits_s = [batch.formed_s - job.sent_s for job in batch.formed.jobs]
        if (kind := self.tasks.get(task)) is None:
            kind = self.tasks[task] = TaskFigures()
        for sums in (self, kind):
            sums.batches += 1
            sums.items += items
            sums.forward_ms += batch.forward_ms
            sums.tokens += batch.tokens
            sums.computed_tokens += batch.computed_tokens
        for reason, count in batch.failed_items.items():
            self.failed_items += count
            self._count_failure(reason, count)
        self.jobs += len(batch.answers)
        self.waited_ms += sum(waits_s) * 1e3
        self.prepare_ms += batch.prepare_ms
        self.queued_ms += batch.queued_ms
        self.commit_ms += batch.commit_ms
        kind.batch_sizes[find_bound(SIZE_BOUNDS, items)] += 1
        kind.outcomes["succeeded"] += list(map(_get_status, batch.answers)).count("committed")
        if batch.reused is not None:
            self._count_reused(task, batch.reused)
        for times in batch.texts:
            # A job in slots is a batch of its own.
            texts = self.texts.setdefault(task, TextFigures())
            texts.add(*times._replace(first_token_s=waits_s[0] + times.first_token_s))
        kind.waited_s += sum(waits_s)
        kind.waits.update([find_bound(WAIT_BOUNDS_S, each) for each in waits_s])

    def job_failed(self, task: str, reason: str) -> None:
        """Counts a job that failed; the reason is the class of its error."""
        self.failed_jobs += 1
        self._count_failure(reason, 1)
        self.job_ended(task, "shed" if reason == DeadlineExceeded.__name__ else "failed")

    def job_ended(self, task: str, outcome: str) -> None:
        """Counts how a job ended whose result no device has stored."""
        self.tasks.setdefault(task, TaskFigures()).outcomes[outcome] += 1

    def _count_failure(self, reason: str, count: int) -> None:
        known = reason in self.failures or len(self.failures) < MAX_REASONS
        self.failures[reason if known else OTHER_REASONS] += count

    def sums(self) -> Any:
        """The sums that are kept of each device."""
        return report(BatchSums(**{each.name: getattr(self, each.name) for each in SUMS}))

    def _count_reused(self, task: str, reused: Mapping[str, Any]) -> None:
        """Counts how the items of one batch of a task with a cache got their outcomes."""
        cache = self.caches.setdefault(task, CacheFigures())
        for name, value in reused.items():
            setattr(cache, name, value if name == "error" else getattr(cache, name) + value)

    def snapshot(self) -> Any:
        """The sums and the means; means are None before the first batch.

        Two snapshots' sums give the means of the time between them.
        """
        return report(self)


def log_batch(task: str, info: Mapping[str, Any], *, tokens: int, waited_ms: float) -> None:
    """Logs one line about a batch.

    Args:
        task: Name of the task.
        info: What `batch_info` makes.
        tokens: Tokens of the items; 0 if the task counts none.
        waited_ms: How long the job that was sent first has waited.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    of_tokens = f", {tokens} tokens, padding {info['padding']:.1%}" if tokens else ""
    logger.info(
        "Batch %s of %s: %s%s, waited %.1f ms, forward %.1f ms on %s%s",
        info["id"],
        task,
        counted(info["size"], "item"),
        of_tokens,
        waited_ms,
        info["forward_ms"],
        info["device"],
        f", version {info['version']}" if "version" in info else "",
    )
