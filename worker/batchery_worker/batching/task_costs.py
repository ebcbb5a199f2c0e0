"""What batches of each task cost a worker's devices, learned from those that ran: pure."""

from typing import Any

from batchery_worker.batching.cost_model import CostModel, Costs

#: Device time of an item of a task that never ran, in seconds. It is corrected when its first batch
#: is back. Too little lets a lane have a few batches in advance. Too much moves the virtual time
#: ahead of all lanes for long, and whoever wakes meanwhile starves.
UNKNOWN_ITEM_S = 0.001

#: What is believed of a task: a batch costs as much as one item besides its items. More would let
#: one small batch promise that large ones are cheap.
BELIEVED = Costs(token_ms=1.0, item_ms=0.0, pass_ms=1.0)


class TaskCosts:
    """A cost model for each task, of items only: the main process knows of no tokens.

    Its devices count as one, at their mean speed.
    """

    def __init__(self) -> None:
        """Has seen no batch."""
        self._models: dict[str, CostModel] = {}

    def ran(self, task: str, items: int, run_s: float) -> None:
        """Adds a batch.

        Args:
            task: Its task.
            items: Number of items.
            run_s: How long it had its device, in seconds; nothing is learned from 0.
        """
        model = self._models.get(task)
        if model is None:
            model = self._models[task] = CostModel(BELIEVED)
        model.ran(items, items, 1, run_s * 1e3)

    def expected_s(self, task: str, items: int) -> float:
        """How long a batch will have its device, in seconds."""
        model = self._models.get(task)
        expected_ms = None if model is None else model.expected_ms(items, items)
        return UNKNOWN_ITEM_S * items if expected_ms is None else expected_ms / 1e3

    def knows(self, task: str) -> bool:
        """Whether a batch of a task is back."""
        model = self._models.get(task)
        return model is not None and model.expected_ms(1, 1) is not None

    def is_believable(self, task: str) -> bool:
        """Whether what is expected of a task has come true of late."""
        model = self._models.get(task)
        return model is not None and model.is_believable

    def error(self, task: str) -> float:
        """Mean relative error of what was expected of late; 0 for a task that never ran."""
        model = self._models.get(task)
        return 0.0 if model is None or model.error is None else model.error

    def max_items(self, task: str, budget_s: float, cap: int) -> int | None:
        """How many items a batch may have; None for a task that never ran.

        Args:
            task: Its task.
            budget_s: How long the batch may have its device, in seconds.
            cap: Maximum of the answer.

        Returns:
            0 to `cap`; 0 if a batch of one item takes longer.
        """
        model = self._models.get(task)
        return None if model is None else model.max_items(budget_s * 1e3, cap=cap)

    def figures(self) -> dict[str, dict[str, Any]]:
        """What `batchery stats` shows of each task whose costs were fitted."""
        return {
            task: {
                "item_us": round(model.costs.token_ms * 1e3, 3),
                "pass_ms": round(model.costs.pass_ms, 3),
                "error": None if model.error is None else round(model.error, 3),
                "batches": model.batches,
            }
            for task, model in self._models.items()
            if model.costs is not None
        }
