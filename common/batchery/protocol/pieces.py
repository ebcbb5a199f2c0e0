"""Piece streams: the partial results of a job on their way from its device to its readers.

Who sends a job with `"stream": true` in its header makes its piece stream first, in the result
backend's Redis. Devices write to it only if it is there, so that nothing is written for a job that
nobody reads, such as the next step of a chain, which inherits headers.

The n-th piece has the id `n-0`. A function that runs again numbers its pieces from 1 again, and
Redis refuses those that it has. So a reader sees each number once, however often the job has run,
and however often a device has sent a piece because an answer was lost.

A reader key says that somebody reads. Readers set its time to live anew every few seconds, so what
is left of it says how long ago that was.

Each process that reads has a wake stream of its own. It waits for that one alone, however many jobs
it reads: devices write there which of them have more now, in one entry for a whole step. An entry
that is lost costs time and no piece, as the reader looks at all piece streams now and then.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import redis
from celery.backends.redis import RedisBackend

from batchery.cluster_client import send_all
from batchery.protocol.headers import HEADER, backend_prefix, is_streamed

#: Field of an entry with a piece, in JSON; and of the entry that says that a result is stored.
PIECE, END = b"p", b"end"

#: Field of an entry of a wake stream: keys of piece streams, a line for each.
WOKEN = b"k"

#: Id of the first entry, which makes the stream.
FIRST_ID = "0-1"

#: To what time to live readers set the reader key, in seconds, and how often.
READER_S = 3600
RENEW_S = 2.0

#: How long a stream is kept once its job has ended, in seconds, unless whoever began it says less,
#: or nobody reads it; its result may be kept for less.
KEEP_S = 3600
KEEP_UNREAD_S = 120

#: How long a wake stream is kept once its process no longer renews it, in seconds.
WAKE_S = 60

#: Maximum number of entries of a wake stream. Of one that has as many, some may be gone.
MAX_WAKES = 16

#: Maximum number of readers of one job who are woken. Of more, some see pieces a second late.
MAX_WOKEN = 8


def keys_begin(backend: Any, name: str) -> bytes:
    """How all of these keys begin in a Redis backend that are about a job or a reader."""
    return backend_prefix(backend, name) + b"batchery-"


def pieces_key(backend: Any, task_id: str) -> bytes:
    """The key of a job's piece stream."""
    return keys_begin(backend, task_id) + b"pieces:" + task_id.encode()


def reader_key(backend: Any, task_id: str) -> bytes:
    """The key that the readers of a job renew; its value says how long its stream is kept."""
    return keys_begin(backend, task_id) + b"reader:" + task_id.encode()


def wake_key(backend: Any, reader_id: str) -> bytes:
    """The key of a process's wake stream."""
    return keys_begin(backend, reader_id) + b"wake:" + reader_id.encode()


def spell_wakes(backend: Any, woken: Mapping[bytes, Iterable[bytes]]) -> list[Sequence[Any]]:
    """The commands that wake readers.

    Args:
        backend: That of the streams.
        woken: Keys of wake streams, among which whoever sends jobs may have put any others; and
            of the piece streams that have more.
    """
    commands: list[Sequence[Any]] = []
    for key, streams in woken.items():
        reader_id = key.rpartition(b"wake:")[2].decode(errors="replace")
        if reader_id and key == wake_key(backend, reader_id):
            entry = ("MAXLEN", MAX_WAKES, "*", WOKEN, b"\n".join(streams))
            commands.append(("XADD", key, "NOMKSTREAM", *entry))
    return commands


def woken_key(backend: Any, task_id: str) -> bytes:
    """The key of the set of wake streams of those who read a job."""
    return keys_begin(backend, task_id) + b"woken:" + task_id.encode()


def piece_number(entry_id: bytes | str) -> int:
    """The number of a piece, from 1, by its id."""
    text = entry_id.decode() if isinstance(entry_id, bytes) else entry_id
    return int(text.partition("-")[0])


def mark_ended(client: Any, backend: Any, task_ids: Iterable[str]) -> None:
    """Tells the readers of jobs that their results are stored; readers also look for themselves.

    Raises:
        RedisError: As for any command.
    """
    longest_s = min(int(backend.expires or KEEP_S), KEEP_S)
    keys = {task_id: pieces_key(backend, task_id) for task_id in task_ids}
    woken = defaultdict[bytes, list[bytes]](list)
    commands: list[Sequence[Any]] = []
    for task_id in keys:
        commands.append(("SRANDMEMBER", woken_key(backend, task_id), MAX_WOKEN))
        commands.append(("GET", reader_key(backend, task_id)))
    told = iter(send_all(client, commands))
    commands = []
    for (task_id, key), wakes, wanted_s in zip(keys.items(), told, told, strict=True):
        kept_s = KEEP_UNREAD_S if wanted_s is None else int(wanted_s or longest_s)
        commands += [
            ("XADD", key, "NOMKSTREAM", "*", END, b""),
            ("EXPIRE", key, min(kept_s, longest_s)),
            ("UNLINK", woken_key(backend, task_id), reader_key(backend, task_id)),
        ]
        for wake in wakes:
            woken[wake].append(key)
    send_all(client, [*commands, *spell_wakes(backend, woken)])


def tell_readers(backend: Any, task_id: str, message: Mapping[str, Any]) -> None:
    """Tells the readers of a job, if it is streamed, that its result is stored.

    Args:
        backend: Any of Celery's.
        task_id: Id of the job.
        message: The headers of its message.
    """
    if is_streamed(message.get(HEADER)) and isinstance(backend, RedisBackend):
        with suppress(redis.RedisError, OSError):  # Readers also look for the result.
            mark_ended(backend.client, backend, [task_id])
