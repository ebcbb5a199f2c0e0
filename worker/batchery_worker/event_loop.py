"""What Celery's event loop needs to be told, and how it ends."""

from typing import Any

from celery.utils import log as celery_log
from celery.worker import state as worker_state


def begin_next_turn(hub: Any) -> None:
    """Lets a loop turn once more before it sleeps; on the loop's own thread.

    `call_soon` alone wakes a loop for other threads only. Where the loop's own thread calls it from
    a timer, or from another call of this kind, the loop sleeps first, for up to a second.
    """
    if (waker := getattr(hub, "_waker", None)) is not None:
        waker.wake()


def is_cold_shutdown() -> bool:
    """Whether the worker was told to end without waiting for anything."""
    # Celery keeps an exit code here, and 0 is a valid one.
    exit_code: Any = worker_state.should_terminate
    return exit_code is not None and exit_code is not False


def is_in_signal_handler() -> bool:
    """Whether Celery handles a signal, over a main thread that stands still anywhere.

    That may be half through a change, or hold a lock, such as that of the log: whoever waits for
    another thread here may wait for ever.
    """
    return bool(celery_log._in_sighandler)  # type: ignore[attr-defined]
