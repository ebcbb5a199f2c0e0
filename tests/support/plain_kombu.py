"""Consumers that use only kombu, with its event loop or without."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import kombu
from kombu.asynchronous import Hub, set_event_loop

from support.patience import patient

TIMEOUT_S = patient(30.0)

OURS = "batchery.transport:Transport"


class Consumer:
    """Consumes queues over one connection, and keeps the messages."""

    def __init__(
        self,
        url: str,
        *queues: str,
        hub: bool = False,
        prefetch: int = 0,
        no_ack: bool = False,
        transport: str | None = OURS,
        **options: Any,
    ) -> None:
        self.connection: Any = kombu.Connection(url, transport=transport, transport_options=options)
        self.prefetch, self.no_ack = prefetch, no_ack
        self.messages: list[Any] = []
        self.consumer: Any = None
        self.hub: Any = None
        if hub:
            self.hub = Hub()
            set_event_loop(self.hub)
        self.open(*queues)

    def open(self, *queues: str) -> None:
        """Consumes, over a new channel."""
        self.channel = self.connection.channel()
        self.channel.basic_qos(0, self.prefetch, False)
        self.consumer = kombu.Consumer(
            self.channel,
            queues=[find_queue(name) for name in queues],
            on_message=self.on_message,
            no_ack=self.no_ack,
        )
        self.consumer.consume()
        if self.hub:
            # As Celery's worker does.
            self.hub.propagate_errors = self.connection.connection_errors
            self.connection.register_with_event_loop(self.hub)
            self.loop = self.hub.create_loop()

    def on_message(self, message: Any) -> None:
        """Keeps it."""
        self.messages.append(message)

    @property
    def texts(self) -> list[str]:
        """The payloads of all messages, in order."""
        return [message.payload for message in self.messages]

    def turn(self) -> None:
        """Waits for one event, but only for a moment."""
        if self.hub:
            # Lets the loop's poll come back soon.
            self.hub.call_later(0.05, lambda: None)
            try:
                next(self.loop)
            except BaseException:
                self.loop = self.hub.create_loop()
                raise
        else:
            with contextlib.suppress(socket.timeout):
                self.connection.drain_events(timeout=0.05)

    def until(self, condition: Callable[[], Any]) -> None:
        """Turns until a condition is true."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"only {self.texts}"
            self.turn()

    def get(self, count: int) -> list[str]:
        """Waits until this many messages have come in total."""
        self.until(lambda: len(self.messages) >= count)
        return self.texts

    def until_waiting(self) -> None:
        """Turns until it waits for a wake-up."""
        self.until(lambda: self.channel._waiting)

    def break_connection(self) -> None:
        """Does what Celery does after a connection broke."""
        self.connection.collect()
        self.messages.clear()
        if self.hub:
            self.hub.reset()

    def close(self) -> None:
        """Closes the connection, which gives all messages back."""
        self.connection.close()
        if self.hub:
            self.hub.close()


def find_queue(name: str) -> kombu.Queue:
    """A queue like Celery's: the default exchange, and a routing key with the queue's name."""
    return kombu.Queue(name, kombu.Exchange(name, type="direct"), routing_key=name)


def send(
    url: str,
    queue: str,
    *texts: str,
    transport: str | None = "kombu.transport.redis:Transport",
    options: Mapping[str, Any] | None = None,
    **properties: Any,
) -> None:
    """Sends messages like a stock client."""
    connection: Any = kombu.Connection(
        url, transport=transport, transport_options=dict(options or {})
    )
    with connection, connection.Producer() as producer:
        for text in texts:
            producer.publish(text, serializer="json", routing_key=queue, exchange="", **properties)


def waiting(client: Any, queue: str = "q") -> int:
    """How many messages are in a queue."""
    return int(client.llen(queue))


def leases(client: Any) -> int:
    """How many leases there are, of all workers."""
    return sum(client.hlen(key) for key in client.keys("*batchery:lease:*"))


#: Makes a consumer of the named queues.
StartConsumer = Callable[..., Consumer]
