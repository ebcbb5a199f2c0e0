"""What the pool needs to run one of Celery's requests and to settle it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from batchery_worker.request import BatchRequest, Lease


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
    #: What its function may see of the request, encoded; empty where it sees none.
    context: bytes = b""
    accepted: bool = False
    #: Done when the state STARTED is stored; None where nobody asked for it.
    started: Future[None] | None = None

    @property
    def task_name(self) -> str:
        """Name under which the task is registered."""
        return str(self.args[0])

    @property
    def task_id(self) -> str:
        """Id of the job."""
        return str(self.args[1])

    @property
    def lease(self) -> Lease | None:
        """The lease of its message; None where there is none (any more)."""
        return None if self.request is None else self.request.lease

    @property
    def message(self) -> Mapping[str, Any]:
        """The message's headers, with `args` and `kwargs` decoded."""
        message: Mapping[str, Any] = self.args[2]
        return message
