"""Dead letters: messages that nobody can execute, kept for people to look at."""

import base64
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from kombu.transport.redis import Channel, Transport

from batchery.transport.keys import Keys
from batchery.transport.ledger import Ledger
from batchery.transport.scripts import Scripts

logger = logging.getLogger("batchery.transport")

#: Most dead letters that one script or command moves: Redis serves nobody else meanwhile.
AT_ONCE = 500

#: Longest reason that is kept, in characters: an error may quote a whole message.
REASON_CHARS = 1000

#: Called with headers and reason of each message that is buried because nobody can read it; the
#: headers have an id, and callbacks, chain and chord where the body has them. A worker stores the
#: failure, so that nobody waits for ever. Called where the worker must not wait.
on_dead: list[Callable[[Mapping[str, Any], str], None]] = []


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What is known of a dead letter, without its message."""

    #: Names it; the number of its last lease, so that later ones are larger.
    token: str
    reason: str
    #: When it was buried, in seconds since 1970.
    died_s: float
    #: Of the job; None where the message does not say.
    id: str | None
    task: str | None
    #: Where it was, and goes when it is requeued.
    queue: str


class DeadLetters:
    """All dead letters of one broker database."""

    def __init__(self, client: Any, prefix: str = "") -> None:
        """Asks nothing of Redis yet.

        Args:
            client: A `redis.Redis` of the broker's database, which answers with bytes.
            prefix: Kombu's `global_keyprefix`.
        """
        self._client = client
        self._prefix = prefix
        self._keys = Keys(prefix)
        self._scripts = Scripts(client)

    @classmethod
    def of(cls, connection: Any) -> "DeadLetters | None":
        """Those of a kombu connection's broker, while it is open; None where that is no Redis."""
        if not isinstance(connection.transport, Transport):
            return None
        channel = connection.default_channel
        # Kombu's own client would put the prefix before some keys and not before others.
        return cls(redis.Redis(connection_pool=channel.pool), channel.global_keyprefix)

    def __len__(self) -> int:
        return int(self._client.hlen(self._keys.dead))

    def __iter__(self) -> Iterator[DeadLetter]:
        """All of them, oldest first."""
        # A scan may find one twice.
        found = dict(self._client.hscan_iter(self._keys.dead, count=AT_ONCE))
        for token, value in sorted(found.items(), key=lambda item: int(item[0])):
            yield self._read(token.decode(), value)

    def get(self, token: str) -> tuple[DeadLetter, bytes] | None:
        """One of them with its message as it was in the queue; None if there is none."""
        value = self._client.hget(self._keys.dead, token)
        raw = self._client.hget(self._keys.dead_messages, token)
        if value is None or raw is None:
            return None
        return self._read(token, value), raw.partition(b"\0")[2]

    def tokens(self) -> list[str]:
        """Tokens of all of them, oldest first."""
        return sorted((token.decode() for token in self._client.hkeys(self._keys.dead)), key=int)

    def requeue(self, tokens: Sequence[str]) -> list[str]:
        """Puts messages back into their queues, behind those that wait there.

        Each is at any time either a dead letter or in its queue.

        Returns:
            The tokens of those that were there.
        """
        keys = [self._keys.dead, self._keys.dead_messages]
        done: list[str] = []
        for part in _parts(tokens):
            answer = self._scripts.run("revive", keys, *part)
            done += [token.decode() for token in answer]
        return done

    def purge(self, tokens: Sequence[str]) -> int:
        """Deletes dead letters for good; returns how many of them were there."""
        count = 0
        for part in _parts(tokens):
            with self._client.pipeline() as pipe:
                pipe.hdel(self._keys.dead_messages, *part)
                pipe.hdel(self._keys.dead, *part)
                count += pipe.execute()[1]
        return count

    def _read(self, token: str, value: bytes) -> DeadLetter:
        key, _, letter = value.partition(b"\0")
        told: dict[str, Any] = json.loads(letter)
        return DeadLetter(
            token=token,
            reason=told["reason"],
            died_s=told["died_s"],
            id=told["id"],
            task=told["task"],
            queue=queue_of(key.decode(errors="replace"), self._prefix),
        )


def queue_of(key: str, prefix: str) -> str:
    """The queue of a key, which may be that of one of its priorities."""
    name = key.removeprefix(prefix)
    head, separator, step = name.rpartition(Channel.sep)
    return head if separator and step.isdigit() else name


def write_letter(reason: str, task_id: str | None, task: str | None) -> dict[str, Any]:
    """What is kept of a message that is about to be buried, beside the message itself."""
    return {
        "reason": reason[:REASON_CHARS],
        "died_s": round(time.time(), 3),
        "id": task_id,
        "task": task,
    }


def bury_malformed(ledger: Ledger, token: str, error: Exception) -> None:
    """Moves a message that cannot be understood to the dead letters, with the reason.

    Raises:
        redis.RedisError: Redis does not answer.
    """
    reason = f"the message cannot be understood: {type(error).__name__}: {error}"[:REASON_CHARS]
    value = ledger.client.hget(ledger.lease_key, token)
    headers = readable_headers((value or b"").partition(b"\0")[2])
    task_id, task = headers.get("id"), headers.get("task")
    ledger.bury(token, write_letter(reason, task_id, task if isinstance(task, str) else None))
    logger.error("%s; it is kept as dead letter %s", reason, token)
    if task_id is not None:
        for tell in on_dead:
            tell(headers, reason)


def readable_headers(message: bytes) -> dict[str, Any]:
    """Headers of a message that is broken somewhere, with what its body says of other jobs.

    Returns:
        An empty one where no id can be read.
    """
    try:
        read: Any = json.loads(message.decode("utf-8", "replace"))
        headers = read["headers"]
        if not isinstance(headers["id"], str):
            return {}
        return {**read_embed(read.get("body")), **headers}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def read_embed(body: Any) -> dict[str, Any]:
    """Callbacks, errbacks, chain and chord of a body, text or base64, where they can be read."""
    try:
        raw = body.encode() if isinstance(body, str) else body
        text = raw if raw.lstrip().startswith(b"[") else base64.b64decode(raw)
        embed: Any = json.loads(text)[2]
        return {str(name): value for name, value in embed.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}


def _parts(tokens: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(tokens), AT_ONCE):
        yield tokens[start : start + AT_ONCE]
