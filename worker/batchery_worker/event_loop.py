"""What Celery's event loop needs to be told."""

from typing import Any


def begin_next_turn(hub: Any) -> None:
    """Lets a loop turn once more before it sleeps; on the loop's own thread.

    `call_soon` alone wakes a loop for other threads only. Where the loop's own thread calls it from
    a timer, or from another call of this kind, the loop sleeps first, for up to a second.
    """
    if (waker := getattr(hub, "_waker", None)) is not None:
        waker.wake()
