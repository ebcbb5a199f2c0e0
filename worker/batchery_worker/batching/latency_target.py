"""How large batches may be, so that jobs are answered within a target: pure.

A job that just missed a batch waits for what runs, for that batch, and then for its own. A batch
is sent when `LEAD_SHARE` of the one before is left, so a batch may take less than half of the
target; and still less where batches of other keys come in between. How many do is what the shares
say: a tenant with thirty kinds of keywords cuts its own batches, not those of the others.

While the cost model cannot be believed, the size follows what happens instead: it grows by steps
while batches of this size take less than that, and is cut by a tenth when one takes more (additive
increase and multiplicative decrease, as in D. Crankshaw et al.: Clipper, NSDI 2017).
"""

from batchery_worker.batching.batch_times import LEAD_SHARE, SHORT_BATCH_S
from batchery_worker.batching.cost_model import TaskCosts
from batchery_worker.job import Limits

#: Batches that a job waits for in any case: the rest of the one that runs, the one that was sent
#: just before the job came, and its own.
BATCHES = 2 + LEAD_SHARE

#: The same for short batches: the next one is sent as soon as one runs.
SHORT_BATCHES = 3

#: Growth of the size after a batch in time, and the first size, as divisors of the maximum size.
STEP_DIVISOR = 16

#: The size grows below this share of what a batch may take: between the two nothing changes.
CALM_SHARE = 0.8

#: A batch below this share of the size says nothing about larger ones. Other devices still have
#: batches of the size before.
FULL_SHARE = 0.5

#: What is left of the size after a batch that was late.
KEPT_SHARE = 0.9


class LatencyTarget:
    """The size of the batches of one task."""

    def __init__(self, limits: Limits) -> None:
        assert limits.target_s is not None
        self._target_s = limits.target_s
        self._cap = limits.max_batch_size
        #: Maximum size while costs are not believed.
        self._size = max(1.0, self._cap / STEP_DIVISOR)

    def max_items(self, task: str, costs: TaskCosts, others: float) -> int:
        """Maximum items of the next batch, at least 1.

        Args:
            task: The task.
            costs: What its batches cost.
            others: How many batches of other keys may come in between.
        """
        if not costs.is_believable(task):
            return int(self._size)
        budget_s = self._budget_s(others) / (1 + costs.error(task))
        return max(1, costs.max_items(task, budget_s, self._cap) or 1)

    def ended(self, items: int, run_s: float, others: float) -> None:
        """Learns from a batch.

        Args:
            items: Number of its items.
            run_s: How long it had its device, in seconds. How long its jobs have waited says
                nothing here: behind a backlog, smaller batches would only make them wait longer.
            others: As for `max_items`.
        """
        if run_s > self._budget_s(others):
            self._size = max(1.0, self._size * KEPT_SHARE)
        elif items >= FULL_SHARE * self._size and run_s < CALM_SHARE * self._budget_s(others):
            self._size = min(float(self._cap), self._size + max(1.0, self._cap / STEP_DIVISOR))

    def _budget_s(self, others: float) -> float:
        budget_s = self._target_s / (BATCHES + others)
        if budget_s < SHORT_BATCH_S:
            return self._target_s / (SHORT_BATCHES + others)
        return budget_s
