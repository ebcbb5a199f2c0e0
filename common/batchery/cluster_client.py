"""A client of a whole Redis Cluster: a command goes to the shard whose tag its first key has.

Celery's code for results, and ours, use it as the client of one server.
"""

import random
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import redis
from redis.client import Pipeline, PubSub
from redis.retry import Retry

from batchery.redis_scripts import packed

#: A shard's tag, with which its keys begin, and its maximum length.
_TAG, _TAG_CHARS = re.compile(rb"\{b\d+\}"), 16

_Redis: Any = redis.Redis
_Pipeline: Any = Pipeline
_PubSub: Any = PubSub


def find_tag(word: Any) -> bytes:
    """The tag with which a key begins; empty if it has none, or is no text."""
    if isinstance(word, str):
        word = word[:_TAG_CHARS].encode(errors="replace")
    found = _TAG.match(word) if isinstance(word, bytes) else None
    return found[0] if found else b""


class ShardPools(redis.ConnectionPool):
    """The connections to all shards of a cluster; its own serve commands without a key.

    Attributes:
        by_tag: The pool of each shard.
    """

    def __init__(self, options: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Does not connect yet.

        Args:
            options: Those of the connections to each shard, by its tag.
        """
        self.by_tag = {tag: redis.ConnectionPool(**each) for tag, each in options.items()}
        super().__init__(**next(iter(options.values())))

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Closes the connections to all shards."""
        super().disconnect(inuse_connections)
        for pool in self.by_tag.values():
            pool.disconnect(inuse_connections)

    def set_retry(self, retry: Retry) -> None:
        """Sets how often commands are tried."""
        super().set_retry(retry)
        for pool in self.by_tag.values():
            pool.set_retry(retry)


class ClusterClient(_Redis):  # type: ignore[misc]
    """A client of all shards, whose pool is a `ShardPools`.

    Of commands with several keys, MGET, UNLINK and DEL may have those of several shards. A pipeline
    is for keys of one shard.

    Attributes:
        shards: A client of each shard, by its tag.
    """

    def __init__(self, connection_pool: ShardPools) -> None:
        super().__init__(connection_pool=connection_pool)
        pools = connection_pool.by_tag
        self.shards = {tag: redis.Redis(connection_pool=pool) for tag, pool in pools.items()}

    def find_pool(self, command: Iterable[Any]) -> "redis.ConnectionPool":
        """The connections to the shard that a command is for."""
        tag = next(filter(None, map(find_tag, command)), b"")
        found: redis.ConnectionPool = self.connection_pool.by_tag.get(tag, self.connection_pool)
        return found

    def execute_command(self, *command: Any, **options: Any) -> Any:
        """Sends a command to its shard."""
        tag = next(filter(None, map(find_tag, command)), b"")
        shard: Any = self.shards.get(tag, super())
        return shard.execute_command(*command, **options)

    def mget(self, keys: Iterable[Any]) -> list[Any]:
        """The values of keys; None for each that is not there."""
        keys = list(keys)
        found = self._send_parts("MGET", keys)
        values = {key: value for part, some in found for key, value in zip(part, some, strict=True)}
        return [values[key] for key in keys]

    def unlink(self, *keys: Any) -> int:
        """Removes keys; returns how many were there."""
        return sum(removed for _, removed in self._send_parts("UNLINK", keys))

    delete = unlink

    def _send_parts(self, name: str, keys: Collection[Any]) -> Iterable[tuple[Sequence[Any], Any]]:
        """Sends a command that takes any number of keys; yields some keys each, and the answer."""
        parts = split_keys(self, keys)
        return zip(parts, send_all(self, [(name, *part) for part in parts]), strict=True)

    def script_load(self, script: Any) -> Any:
        """Has all shards know a script; returns its digest."""
        digests = [shard.script_load(script) for shard in self.shards.values()]
        return digests[0]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> "_ShardPipeline":  # noqa: ARG002
        """A pipeline for keys of one shard."""
        return _ShardPipeline(self, transaction)

    def pubsub(self, **options: Any) -> "_ClusterPubSub":
        """A subscription at any node, as all of them have all messages."""
        return _ClusterPubSub(self, **options)


class _ShardPipeline(_Pipeline):  # type: ignore[misc]
    def __init__(self, client: ClusterClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._client = client

    def execute_command(self, *command: Any, **options: Any) -> Any:
        if self.connection is None and not self.command_stack:
            self.connection_pool = self._client.find_pool(command)
        return super().execute_command(*command, **options)

    def publish(self, channel: Any, _: Any, **options: Any) -> Any:
        """Publishes the fact alone, as each node would send the message to all others."""
        return super().publish(channel, b"", **options)


class _ClusterPubSub(_PubSub):  # type: ignore[misc]
    """Messages that have only the fact are given what is stored under the channel's name."""

    def __init__(self, client: ClusterClient, **options: Any) -> None:
        pools = list(client.connection_pool.by_tag.values())
        super().__init__(random.choice(pools), **options)
        self._client = client

    def handle_message(self, *args: Any, **options: Any) -> Any:
        message = super().handle_message(*args, **options)
        if message is not None and message["type"] == "message":
            message["data"] = self._client.get(message["channel"])
            return None if message["data"] is None else message
        return message


def split_keys(client: Any, keys: Collection[Any]) -> Sequence[Sequence[Any]]:
    """Keys by the servers of a client that have them: in a cluster, those of each shard."""
    if not isinstance(client, ClusterClient):
        return [list(keys)] if keys else []
    parts = defaultdict[bytes, list[Any]](list)
    for key in keys:
        parts[find_tag(key)].append(key)
    return list(parts.values())


def send_all(client: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Sends commands in one round trip, in a cluster to all shards at once.

    A pipeline of redis-py takes as long as all else that is done with some answers.

    Args:
        client: Of one server, or a `ClusterClient`, with whose retries they are sent.
        commands: The words of each; in a cluster they may be sent again.

    Returns:
        The answers in the order of the commands, as Redis spells them.

    Raises:
        redis.RedisError: As for any command.
    """
    if not isinstance(client, ClusterClient):
        return _exchange({client.connection_pool: range(len(commands))}, commands)
    parts = defaultdict[Any, list[int]](list)
    for number, command in enumerate(commands):
        parts[client.find_pool(command)].append(number)
    answers: list[Any] = client.get_retry().call_with_retry(
        partial(_exchange, parts, commands), lambda _: None
    )
    return answers


def _exchange(parts: Mapping[Any, Sequence[int]], commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Sends commands by several pools, each those with some numbers, and reads all answers."""
    answers: dict[int, Any] = {}
    connections: dict[Any, Any] = {}
    refusals: list[redis.ResponseError] = []
    try:
        for pool, numbers in parts.items():
            connections[pool] = connection = pool.get_connection()
            connection.send_packed_command((packed(*(commands[each] for each in numbers)),))
        for pool, numbers in parts.items():
            for number in numbers:
                try:
                    answers[number] = connections[pool].read_response()
                except redis.ResponseError as refusal:
                    refusals.append(refusal)
    except BaseException:
        for connection in connections.values():
            connection.disconnect()  # There may be answers that were not read.
        raise
    finally:
        for pool, connection in connections.items():
            pool.release(connection)
    if refusals:
        raise refusals[0]
    return [answers[number] for number in range(len(commands))]
