"""What the pool needs to run one of Celery's requests and to settle it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchery_worker.request import BatchRequest


@dataclass(slots=True)
class Ticket:
    """One call of `apply_async` by Celery, for a batch task."""

    #: Celery's tracer and its arguments, of which the third is the request dictionary.
    target: Callable[..., tuple[int, Any, float]]
    args: Sequence[Any]
    callback: Callable[[tuple[int, Any, float]], None]
    accept_callback: Callable[[int, float], None]
    error_callback: Callable[[Any], None]
    #: The request whose methods the callbacks are; None for a caller that is not Celery's worker.
    request: BatchRequest | None
    items: Sequence[Any] = ()
    is_packed: bool = False
    accepted: bool = False

    @property
    def task_name(self) -> str:
        """Name under which the task is registered."""
        return str(self.args[0])

    @property
    def task_id(self) -> str:
        """Id of the job."""
        return str(self.args[1])

    @property
    def message(self) -> Mapping[str, Any]:
        """The message's headers, with `args` and `kwargs` decoded."""
        message: Mapping[str, Any] = self.args[2]
        return message
