"""What workers tell by Celery's events, heard by Celery's own unmodified client."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Self

from celery import Celery

from support.patience import TIMEOUT_S


class Events:
    """What workers tell while the block runs."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.seen: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        connection = self._stack.enter_context(self._app.connection_for_read())
        receiver: Any = self._app.events.Receiver(connection, handlers={"*": self.seen.append})
        self._listening, _, _ = self._stack.enter_context(receiver.consumer_context(wakeup=False))
        # Nobody says when the subscription holds; an event of our own does.
        own = self._stack.enter_context(self._app.connection_for_read())
        sender: Any = self._stack.enter_context(self._app.events.Dispatcher(own))
        while "test-probe" not in [event["type"] for event in self.seen]:
            sender.send("test-probe")
            with contextlib.suppress(TimeoutError):
                self._listening.drain_events(timeout=0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, job_id: str, last: str = "task-succeeded") -> dict[str, dict[str, Any]]:
        """The events of a job by type, once the last one has come."""
        self.listen_until(lambda: last in self.kinds(job_id), f"{last} of {job_id}")
        return {event["type"]: event for event in self.all_of(job_id)}

    def all_of(self, job_id: str) -> list[dict[str, Any]]:
        """All events of a job that have come so far, in their order."""
        return [event for event in self.seen if event.get("uuid") == job_id]

    def kinds(self, job_id: str) -> list[str]:
        """The types of the events of a job that have come so far, in their order."""
        return [event["type"] for event in self.all_of(job_id)]

    def listen_until(self, condition: Callable[[], bool], what: str) -> None:
        """Hears events until a condition is true.

        Raises:
            AssertionError: It was not true in time.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {TIMEOUT_S:g} s: {what}"
            with contextlib.suppress(TimeoutError):
                self._listening.drain_events(timeout=1)
