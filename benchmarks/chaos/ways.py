"""Ways of a job's messages into the system: into a list of Redis, or to a RabbitMQ."""

import base64
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from benchmarks.redis_clients import connect, find_tag

#: Number of the last job that was submitted there, so that none is submitted twice.
MARK = "chaos:submitted"

# First the mark: at maxmemory Redis then refuses the script before it has done anything.
SUBMIT = """
if tonumber(ARGV[1]) > tonumber(redis.call('GET', KEYS[1]) or -1) then
    redis.call('SET', KEYS[1], ARGV[1])
    for at = 2, #KEYS do
        redis.call('LPUSH', KEYS[at], ARGV[at])
    end
end
"""

#: Longest wait for RabbitMQ, in seconds.
ANSWER_S = 5.0


class RedisWay:
    """Messages of a job go to Redis in one script, which does nothing the second time."""

    #: Whether a job is there once, however often it was put.
    is_exact = True

    def __init__(self, url: str) -> None:
        """Connects to nothing yet, but to a cluster.

        Args:
            url: Of a Redis or a cluster; it may be down at any time.
        """
        self._url = url
        self._redis = connect(url)

    def put(self, number: int, messages: Sequence[str]) -> None:
        """Puts the messages of a job into their queues, which on a cluster are of one shard.

        Raises:
            RedisError, RedisClusterException, OSError: It is down or full; put them again.
        """
        queues = [find_queue(each) for each in messages]
        tag = find_tag(self._url, queues[0])
        keys = [f"{tag}{each}" for each in (MARK, *queues)]
        self._redis.eval(SUBMIT, len(keys), *keys, number, *messages)

    def throw(self, queue: str, message: bytes) -> None:
        """Puts something into a queue as it is; raises as `put` does."""
        self._redis.lpush(f"{find_tag(self._url, queue)}{queue}", message)

    def close(self) -> None:
        """Closes its connections."""
        self._redis.close()


class RabbitWay:
    """Messages go to a RabbitMQ, which confirms each when it is on its disk.

    If the confirmation is lost, it has the message twice: RabbitMQ cannot tell.
    """

    is_exact = False

    def __init__(self, url: str, queues: Iterable[str]) -> None:
        """Connects to nothing yet.

        Args:
            url: Its URL; it may be down at any time.
            queues: Those that messages may go to, declared as Celery does.
        """
        self._url = url
        self._queues = [Queue(each, Exchange(each), each) for each in queues]
        self._connection: Any = None

    def put(self, _: int, messages: Sequence[str]) -> None:
        """Puts the messages of a job into their queues.

        Raises:
            OSError: It is down; put them again.
        """
        try:
            producer = self._connect()
            for text in messages:
                message = json.loads(text)
                producer.publish(
                    base64.b64decode(message["body"]),
                    routing_key=find_queue(text),
                    content_type=message["content-type"],
                    content_encoding=message["content-encoding"],
                    headers=message["headers"],
                    delivery_mode=2,
                    **{name: message["properties"].get(name) for name in KEPT},
                )
        except self._errors as error:
            self.close()
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Closes its connection."""
        if self._connection is not None:
            with suppress(*self._errors):
                self._connection.close()
            self._connection = None

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        transport: Any = Connection(self._url)
        return (*transport.connection_errors, *transport.channel_errors, OperationalError, OSError)

    def _connect(self) -> Any:
        if self._connection is None:
            self._connection = Connection(
                self._url,
                connect_timeout=ANSWER_S,
                transport_options={"confirm_publish": True, "read_timeout": ANSWER_S},
            )
            for queue in self._queues:
                queue(self._connection.default_channel).declare()
        return self._connection.Producer(auto_declare=False)


#: Properties of a message that mean something to who receives it.
KEPT = ("correlation_id", "reply_to", "priority")


def find_queue(message: str) -> str:
    """The queue that a message is for."""
    return str(json.loads(message)["properties"]["delivery_info"]["routing_key"])
