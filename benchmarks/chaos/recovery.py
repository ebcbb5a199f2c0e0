"""How long the jobs of a lost worker waited until another had them. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chaos.answers import Answer
from benchmarks.chaos.ledger import Receipt


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker was killed or stopped."""

    #: Its name.
    worker: str
    at_s: float
    how: str
    #: Workers that consumed then, besides it: without one, its jobs must wait for a new worker.
    others: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of the jobs that a lost worker had."""

    how: str
    jobs: int
    #: From the loss until the last of them was received by another worker, or seen to be answered.
    seconds: float
    #: Nothing else went wrong meanwhile, and another worker was there.
    is_calm: bool


def recoveries(
    losses: Iterable[Loss],
    receipts: Sequence[Receipt],
    answers: Mapping[str, Answer],
    faults_s: Sequence[float],
) -> list[Recovery]:
    """Follows the jobs of each lost worker; a job that never came back is not part of it.

    Args:
        losses: Workers that were killed or stopped.
        receipts: All messages that workers have received, by time.
        answers: By task id.
        faults_s: When workers, Redis or the network were disturbed; the losses are among them.
    """
    by_task: dict[str, list[Receipt]] = defaultdict(list)
    by_worker: dict[str, set[str]] = defaultdict(set)
    for receipt in receipts:
        by_task[receipt.task_id].append(receipt)
        by_worker[receipt.worker].add(receipt.task_id)
    found = []
    for loss in losses:
        ends_s = [
            end_s
            for task_id in by_worker[loss.worker]
            if (end_s := _handed_on_s(loss, by_task[task_id], answers.get(task_id))) is not None
        ]
        if ends_s:
            last_s = max(ends_s)
            # The loss itself is the first of them.
            disturbed = sum(loss.at_s <= at_s <= last_s for at_s in faults_s) > 1
            is_calm = loss.others > 0 and not disturbed
            found.append(Recovery(loss.how, len(ends_s), last_s - loss.at_s, is_calm))
    return found


def _handed_on_s(loss: Loss, history: Sequence[Receipt], answer: Answer | None) -> float | None:
    """When a task that the lost worker had was somewhere else; None if it had not or never was."""
    before = [receipt for receipt in history if receipt.at_s <= loss.at_s]
    if not before or before[-1].worker != loss.worker:
        return None
    ends_s = [receipt.at_s for receipt in history if receipt.at_s > loss.at_s][:1]
    if answer is not None:
        if answer.at_s <= loss.at_s:
            return None
        ends_s.append(answer.at_s)
    return min(ends_s, default=None)
