"""Where an engine computes: on a device of this process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from batchery.errors import DeviceDied
from batchery.execution.batch import are_same, prepare
from batchery.outcomes import Failed
from batchery.tracebacks import with_frames
from batchery_worker.device.loading import EngineModel
from batchery_worker.device.served_model import LoadedModel

#: Says which batch comes next, if that is known: its items and its keywords.
LookAhead = Callable[[], tuple[list[Any], Mapping[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What became of a batch.

    Attributes:
        outcomes: One per item, in order.
        tokens: Tokens of the items.
        computed_tokens: Tokens that were computed, with padding.
    """

    outcomes: list[Any]
    tokens: int
    computed_tokens: int


class LocalDevice:
    """Computes on the calling thread, always the same one: CUDA knows a device per thread."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._served: LoadedModel | None = None
        #: Why it computes nothing any more, until it is closed; empty while it does.
        self.problem = ""
        #: The batch that comes next: its items as they were given, and prepared.
        self._ahead: tuple[Sequence[Any], Mapping[str, Any], list[Any]] | None = None

    def load(self) -> None:
        """Loads the model and warms it up."""
        _, self._served = self._model.serve()

    def run(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        """Computes one batch; prepares the next one while passes run that were only launched."""
        served = self._served
        assert served is not None
        if self.problem:
            return self._refuse(items)
        prepared = self._prepared(items, keywords)
        self._ahead = None

        def start_next() -> None:
            if self._ahead is None:
                following = look_ahead()
                if following is None:
                    return
                self._ahead = (*following, prepare(served.model, *following))
            _, coming, ready = self._ahead
            served.start(ready, self._model.work(coming))

        work = self._model.work(keywords)
        try:
            answer = BatchAnswer(*served.compute(prepared, work, nullcontext, start_next))
        except DeviceDied as error:
            self.problem = f"{error}; only a new process can use this device"
            return self._refuse(items)
        for each in answer.outcomes:
            show_origin(each)
        return answer

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model."""
        return {} if self._served is None else self._served.figures()

    def close(self) -> None:
        """Frees the model."""
        served, self._served, self._ahead = self._served, None, None
        if served is not None and not self.problem:
            served.model.unload()

    def _refuse(self, items: Sequence[Any]) -> BatchAnswer:
        # Not raised: halves of the batch would try it again.
        return BatchAnswer([Failed(DeviceDied(self.problem)) for _ in items], 0, 0)

    def _prepared(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """The items, prepared now or before: callers may have given up in between."""
        assert self._served is not None
        if self._ahead is not None:
            ahead, same_keywords, prepared = self._ahead
            if keywords == same_keywords and are_same(items, ahead):
                return prepared
        return prepare(self._served.model, items, keywords)


def show_origin(outcome: Any) -> None:
    """Lets the exception of a failure show where it was raised."""
    if isinstance(outcome, Failed) and outcome.frames:
        with_frames(outcome.exception, outcome.frames)
