"""One device's hold on Redis without the device: it leases messages, and keeps them."""

import contextlib
import json
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery

from batchery.transport import use_transport
from batchery.transport.lease_store import LeaseStore
from batchery_worker.device.redis_source import RedisSource
from support.patience import TIMEOUT_S


class Room:
    """Lets so many messages be leased at a time."""

    def __init__(self, lessee: "Lessee", room: int) -> None:
        self._lessee = lessee
        self._room = room

    def count_free(self) -> int:
        """Lessees are not entered as waiting."""
        return 0

    def limit_for(self, queue: str, level: int) -> int:
        """What is left of the room, for all queues together."""
        return self._room - len(self._lessee.held)

    def find_jobs(self, queue: str) -> Any:
        """The same for all queues."""
        return "all"


class Lessee:
    """Leases from queues, as each device does."""

    def __init__(
        self,
        url: str,
        *queues: str,
        room: int = 1000,
        class_levels: Sequence[int] = (),
        **options: Any,
    ) -> None:
        use_transport()
        self._app = Celery(broker=url, set_as_current=False)
        self._app.conf.broker_transport_options = options
        self.messages: list[Any] = []
        #: Tokens of what is not settled.
        self.held: list[str] = []
        self.source = RedisSource(
            *(self._app, queues, class_levels, "lessee", self._deliver, lambda _: self.held)
        )
        self.source.workload = Room(self, room)
        assert self.source.connect()

    @property
    def store(self) -> LeaseStore:
        """The leases."""
        store = self.source.lease_store
        assert store is not None
        return store

    def _deliver(self, payload: Any) -> None:
        self.messages.append(payload)
        self.held.append(payload["properties"]["delivery_tag"])

    @property
    def texts(self) -> list[Any]:
        """The bodies of all messages, in order."""
        return [read_body(each) for each in self.messages]

    def turn(self, timeout_s: float = 0.05) -> None:
        """Takes what there is; waits for a change if there is nothing."""
        if self.source.connect() and self.source.ask() and (answer := self.source.read()):
            self.source.take_in(answer)
        elif not self.source.may_have_more:
            self.source.wait(timeout_s, lambda: False)

    def until(self, condition: Callable[[], Any]) -> None:
        """Turns until a condition is true."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"only {self.texts}"
            self.turn()

    def get(self, count: int) -> list[Any]:
        """Waits until this many messages have come in total."""
        self.until(lambda: len(self.messages) >= count)
        return self.texts

    def until_waiting(self) -> None:
        """Turns until Redis tells of changes."""
        self.turn()
        self.until(lambda: not self.source.may_have_more)

    def ack(self, at: int) -> None:
        """Settles a message, if it is not settled yet."""
        token = self.messages[at]["properties"]["delivery_tag"]
        if token in self.held:
            self.held.remove(token)
            self.store.ack(token)
            self.store.flush()

    def close(self) -> None:
        """Gives back what is not settled."""
        with contextlib.suppress(ConnectionError):
            self.store.close()
        self._app.close()


def read_body(payload: Any) -> Any:
    """The body of a message, whose encoding may be any of kombu's."""
    body = payload["body"]
    if payload["properties"].get("body_encoding") == "base64":
        body = b64decode(body)
    return json.loads(body)


#: Makes a lessee of the named queues.
StartLessee = Callable[..., Lessee]
