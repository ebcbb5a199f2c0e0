"""Questions to one running worker, over Celery's remote control; its app need not be imported."""

import re
from typing import Any

from celery import Celery
from kombu import Connection
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

#: How long the worker may take for one answer, in seconds; a busy machine needs some of it.
TIMEOUT_S = 5.0

#: The same while it starts and is asked again and again.
PING_TIMEOUT_S = 1.0

#: A task in the answer to `inspect registered queue model_queue`.
REGISTERED = re.compile(r"(?P<name>\S+)(?: \[.*queue=(?P<queue>.+)\])?")


class RemoteWorker:
    """A worker that answers questions, unless its app has switched remote control off."""

    def __init__(self, redis_url: str, name: str) -> None:
        self._redis_url = redis_url
        self._name = name

    def answers(self) -> bool:
        """Whether it answers at all: then it has started."""
        return self._ask("ping", timeout_s=PING_TIMEOUT_S) is not None

    def tasks(self) -> dict[str, str | None]:
        """Queue by name of each of its tasks; None where the task itself names none."""
        answer = self._ask("registered", "queue", "model_queue") or []
        found = (REGISTERED.fullmatch(task) for task in answer)
        return {match["name"]: match["queue"] for match in found if match}

    def queues(self) -> list[str]:
        """Names of the queues that it consumes, sorted."""
        return sorted(queue["name"] for queue in self._ask("active_queues") or [])

    def _ask(self, question: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Any:
        control: Any = Celery(set_as_current=False).control
        # Else it would publish to the broker of the environment rather than over the connection.
        control.mailbox.producer_pool = None
        try:
            with Connection(self._redis_url) as connection:
                inspect = control.inspect([self._name], timeout=timeout_s, connection=connection)
                answers = getattr(inspect, question)(*arguments)
        except (OperationalError, RedisError):
            return None
        return (answers or {}).get(self._name)
