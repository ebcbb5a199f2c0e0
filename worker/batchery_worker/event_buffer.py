"""Lets the task events of a whole batch leave in one message."""

from typing import TYPE_CHECKING, Any

from celery import bootsteps

if TYPE_CHECKING:
    _Step: Any
else:
    _Step = bootsteps.StartStopStep

#: Events that are sent together at most. Celery sends what it has at the end of each turn of its
#: loop, but in between after every 24 events: eight messages for a batch of 64 jobs.
MAX_EVENTS = 1000


class EventBuffer(_Step):  # type: ignore[misc]
    """A step of Celery's consumer, run after each connection to the broker."""

    requires = ("celery.worker.consumer.events:Events",)

    def start(self, parent: Any) -> None:
        """Called by Celery with its `Consumer`, which has a fresh dispatcher of events."""
        # None in a worker that sends neither events nor heartbeats.
        if parent.event_dispatcher is not None:
            parent.event_dispatcher.buffer_limit = MAX_EVENTS
