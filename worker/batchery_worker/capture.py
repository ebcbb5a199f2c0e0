"""What Celery's tracer would write for one job: held back, to be written in one step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from celery.backends.redis import RedisBackend
from celery.states import PENDING, SUCCESS

from batchery.transport.sending import Sending, Unsent
from batchery_worker.redis_commit import script_text

#: What store.lua says of a stored result that it cannot read.
UNSURE = 2


class Capture:
    """The messages and the result of one job."""

    def __init__(self, task_id: str, sending: Sending) -> None:
        """Empty.

        Args:
            task_id: Of the job; what is stored under another one is not held back.
            sending: Of the job; its messages come here.
        """
        self.task_id = task_id
        self.messages: list[Unsent] = []
        sending.outbox = self.messages
        #: Of the job.
        self.sending = sending
        #: The result as it is stored; empty if none is.
        self.value: bytes | str = b""
        self._store: Callable[[], None] = _nothing

    def hold(self, value: bytes | str, store: Callable[[], None]) -> None:
        """Takes a result.

        Args:
            value: As it is stored.
            store: Stores it in Celery's own way.
        """
        self.value, self._store = value, store

    def replay(self) -> None:
        """Writes everything after all, as if it had not been held back: messages marked."""
        self.sending.outbox = None
        for message in self.messages:
            message.send(self.sending)
        self._store()


_capture: ContextVar[Capture | None] = ContextVar("batchery_capture", default=None)


@contextmanager
def capturing(capture: Capture | None) -> Iterator[None]:
    """Holds back what this thread stores by a backend of `make_capturable`; None holds nothing."""
    token = _capture.set(capture)
    try:
        yield
    finally:
        _capture.reset(token)


def make_capturable(backend: Any) -> None:
    """Lets results of Celery's Redis backend be held back; it has no public way to do so.

    What is not held back is written without a gap between looking for a SUCCESS and writing: into
    that gap of Celery's falls the SUCCESS of a retry which was sent before RETRY is stored.

    Args:
        backend: Of a thread of its own; another one than Celery's for Redis is left as it is.
    """
    is_redis = isinstance(backend, RedisBackend)
    if not is_redis or isinstance(backend._set_with_state, partial):
        return
    look, store = backend._get_task_meta_for, backend._set_with_state
    script = backend.client.register_script(script_text("store"))
    backend._get_task_meta_for = partial(_look, look)
    backend._set_with_state = partial(_store, backend, partial(_write, backend, script, store))


def _look(stock: Callable[..., Any], task_id: str) -> Any:
    capture = _capture.get()
    if capture is None or task_id != capture.task_id:
        return stock(task_id)
    # Celery asks whether a SUCCESS is stored already; whoever writes in the end asks as well.
    return {"status": PENDING}


def _store(
    backend: Any, write: Callable[..., None], key: Any, value: bytes | str, state: str
) -> None:
    capture = _capture.get()
    fits = len(value) <= backend._MAX_STR_VALUE_SIZE
    if capture is None or not fits or key != backend.get_key_for_task(capture.task_id):
        write(key, value, state)
    else:
        capture.hold(value, partial(write, key, value, state))


def _write(
    backend: Any,
    script: Any,
    stock: Callable[..., None],
    key: Any,
    value: bytes | str,
    state: str,
) -> None:
    is_result = backend.key_t(key).startswith(backend.task_keyprefix)
    if not is_result or len(value) > backend._MAX_STR_VALUE_SIZE:
        stock(key, value, state)
    elif script(keys=[key], args=[value, int(backend.expires or 0)]) == UNSURE:
        _write_carefully(backend, stock, key, value, state)


def _write_carefully(
    backend: Any, stock: Callable[..., None], key: Any, value: bytes | str, state: str
) -> None:
    """Looks with Celery's own decoders; for results that no script can read."""
    with capturing(None):
        known = backend._get_task_meta_for(backend._strip_prefix(key))
    if known["status"] != SUCCESS:
        stock(key, value, state)


def _nothing() -> None:
    """There is no result to be stored."""
