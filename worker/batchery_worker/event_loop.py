"""What Celery's event loop needs to be told, and how it ends."""

from typing import Any

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
