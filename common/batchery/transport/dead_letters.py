"""Dead letters: messages that nobody can execute, kept for people to look at."""

import base64
import heapq
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import redis
from celery.utils.functional import chunks
from kombu.transport.redis import Channel, Transport

from batchery.errors import InvalidItem
from batchery.transport.redis_schema import Keys, split_list, transport_scripts

#: Maximum number of dead letters that one command moves: Redis serves nobody else meanwhile.
MAX_TOKENS_PER_COMMAND = 500

#: Longest reason that is kept, in characters: an error may quote a whole message.
MAX_REASON_CHARS = 1000

#: Times at which nothing dies, in seconds since 1970: behind the year 5000.
MAX_DIED_S = 1e11

#: Largest message that is read, in bytes: what it says takes ten times as much memory. A larger one
#: becomes a dead letter, and not even its headers are read.
MAX_MESSAGE_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """The description of a dead letter, without its message."""

    #: Its id: the number of its last lease, so later dead letters have larger ones.
    token: str
    reason: str
    #: When it became a dead letter, in seconds since 1970; 0 for what is none.
    died_s: float
    #: Id of the job; None if it cannot be read.
    id: str | None
    #: Name of the task; None if it cannot be read.
    task: str | None
    #: The queue that it came from, and returns to when it is requeued.
    queue: str


class DeadLetters:
    """All dead letters of one broker database."""

    def __init__(self, client: Any, prefix: str = "") -> None:
        """Asks Redis nothing yet.

        Args:
            client: A `redis.Redis` for the broker's database, which answers with bytes.
            prefix: Kombu's `global_keyprefix`.
        """
        self._client = client
        self._prefix = prefix
        self._keys = Keys(prefix)
        self._scripts = transport_scripts(client)

    @classmethod
    def of(cls, connection: Any) -> "DeadLetters | None":
        """The dead letters of an open kombu connection's broker; None if it is not a Redis."""
        if not isinstance(connection.transport, Transport):
            return None
        channel = connection.default_channel
        # Kombu's own client would add the prefix to some keys and not to others.
        return cls(redis.Redis(connection_pool=channel.pool), channel.global_keyprefix)

    def __len__(self) -> int:
        return int(self._client.hlen(self._keys.dead))

    def __iter__(self) -> Iterator[DeadLetter]:
        """All dead letters, oldest first; what a stranger has put there is last, and says so."""
        # A scan may return one of them twice.
        found = dict(self._client.hscan_iter(self._keys.dead, count=MAX_TOKENS_PER_COMMAND))
        named = {token.decode(errors="backslashreplace"): value for token, value in found.items()}
        for token in sorted(named, key=_rank):
            yield self._read(token, named[token])

    def get(self, token: str) -> tuple[DeadLetter, bytes] | None:
        """A dead letter with its message as it was in the queue; None if there is none."""
        value = self._client.hget(self._keys.dead, token)
        raw = self._client.hget(self._keys.dead_messages, token)
        if value is None or raw is None:
            return None
        return self._read(token, value), raw.partition(b"\0")[2]

    def find(self, task_id: str) -> str | None:
        """The token of a job's dead letter, by the job's id; the newest, if there are several."""
        tokens = [letter.token for letter in self if letter.id == task_id]
        return tokens[-1] if tokens else None

    def tokens(self) -> list[str]:
        """Tokens of all dead letters, oldest first."""
        found = self._client.hkeys(self._keys.dead)
        return sorted((token.decode(errors="backslashreplace") for token in found), key=_rank)

    def requeue(self, tokens: Sequence[str]) -> list[str]:
        """Moves messages to the end of their queues; each move is one step.

        Returns:
            The tokens of the dead letters that existed.
        """
        keys = [self._keys.dead, self._keys.dead_messages]
        done: list[str] = []
        for part in chunks(iter(tokens), MAX_TOKENS_PER_COMMAND):
            answer = self._scripts.run("requeue_dead_letters", keys, *part)
            done += [token.decode() for token in answer]
        return done

    def purge(self, tokens: Sequence[str]) -> list[str]:
        """Deletes dead letters for good; returns the tokens of those that existed."""
        done: list[str] = []
        for token in tokens:
            with self._client.pipeline() as pipe:
                pipe.hdel(self._keys.dead_messages, token)
                pipe.hdel(self._keys.dead, token)
                done += [token] if pipe.execute()[1] else []
        return done

    def _read(self, token: str, value: bytes) -> DeadLetter:
        key, _, letter = value.partition(b"\0")
        try:
            entry: dict[str, Any] = json.loads(letter)
            died_s = float(entry["died_s"])
            if not 0 <= died_s < MAX_DIED_S:
                raise ValueError
            return DeadLetter(
                token=token,
                reason=str(entry["reason"]),
                died_s=died_s,
                id=entry["id"],
                task=entry["task"],
                queue=find_queue(key.decode(errors="replace"), self._prefix),
            )
        except (ValueError, TypeError, LookupError, RecursionError):
            shown = value[:MAX_REASON_CHARS].decode(errors="backslashreplace")
            return DeadLetter(token, f"this is no dead letter: {shown}", 0.0, None, None, "-")


class AllDeadLetters:
    """Those of several databases, as `DeadLetters` has those of one: tokens are all different."""

    def __init__(self, parts: Sequence[DeadLetters]) -> None:
        """Asks Redis nothing yet."""
        self._parts = parts

    def __iter__(self) -> Iterator[DeadLetter]:
        """All dead letters, about oldest first."""
        return heapq.merge(*self._parts, key=lambda letter: letter.died_s)

    def get(self, token: str) -> tuple[DeadLetter, bytes] | None:
        """A dead letter with its message; None if there is none."""
        return next(filter(None, (part.get(token) for part in self._parts)), None)

    def find(self, task_id: str) -> str | None:
        """The token of a job's dead letter."""
        tokens = [letter.token for letter in self if letter.id == task_id]
        return tokens[-1] if tokens else None

    def tokens(self) -> list[str]:
        """Tokens of all dead letters."""
        return list(chain.from_iterable(part.tokens() for part in self._parts))

    def requeue(self, tokens: Sequence[str]) -> list[str]:
        """Moves messages to the end of their queues."""
        return list(chain.from_iterable(part.requeue(tokens) for part in self._parts))

    def purge(self, tokens: Sequence[str]) -> list[str]:
        """Deletes dead letters for good."""
        return list(chain.from_iterable(part.purge(tokens) for part in self._parts))


def _rank(token: str) -> tuple[bool, int, str]:
    """Tokens are numbers; whatever else is there comes behind them."""
    is_number = token.isascii() and token.isdigit()
    return not is_number, int(token) if is_number else 0, token


def find_queue(key: str, prefix: str) -> str:
    """The queue of a key, which may be that of any of its lists."""
    return split_list(key.removeprefix(prefix), Channel.sep)[0]


def describe(reason: str, task_id: Any, task: Any) -> dict[str, Any]:
    """Describes a message that is about to become a dead letter; stored next to the message.

    Args:
        reason: For people.
        task_id: What the message says is its id; None if it is no text.
        task: What it says is its task; the same.
    """
    return {
        "reason": reason[:MAX_REASON_CHARS],
        "died_s": round(time.time(), 3),
        "id": task_id if isinstance(task_id, str) else None,
        "task": task if isinstance(task, str) else None,
    }


def as_one_line(text: str | None) -> str:
    """What a message says, for a log: with a line break in it, it would write lines of its own."""
    shown = str(text)
    return shown if shown.isprintable() else repr(shown)[1:-1]


def check_size(message: bytes | str) -> None:
    """Checks the size of a message, or of its body, which is nearly all of it.

    Raises:
        InvalidItem: No worker would read it.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise InvalidItem(
            f"the message has {len(message):,} bytes, and the maximum is {MAX_MESSAGE_BYTES:,};"
            " send where the data are, in the place of the data"
        )


def readable_headers(message: bytes) -> dict[str, Any]:
    """Reads the headers of a broken message, and its callbacks, errbacks, chain and chord.

    Returns:
        An empty dictionary if no id can be read, or the message is too large.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        return {}
    try:
        read: Any = json.loads(message.decode("utf-8", "replace"))
        headers = read["headers"]
        if not isinstance(headers["id"], str):
            return {}
        return {**read_embed(read.get("body")), **headers}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def read_embed(body: Any) -> dict[str, Any]:
    """Reads callbacks, errbacks, chain and chord of a body, text or base64; empty if unreadable."""
    try:
        raw = body.encode() if isinstance(body, str) else body
        text = raw if raw.lstrip().startswith(b"[") else base64.b64decode(raw)
        embed: Any = json.loads(text)[2]
        return {str(name): value for name, value in embed.items()}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
