"""Suspects: the jobs that were on a device when their worker died, or were just read by it.

A worker notes each batch in Redis before it goes to a device, and does not wait for the answer: a
note that was sent outlives the process. To wait would cost the event loop 0.1 ms per batch.

A message may end its worker while it is read, before anything runs. So each fetch notes what it
brings, and the next one removes that note. Messages that were in such a note when their worker died
are read one by one, each with a note of its own.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import quote

import redis

from batchery.redis_scripts import packed
from batchery.transport.redis_schema import Keys

logger = logging.getLogger("batchery.transport")

#: Ids that need no quoting; almost all task ids.
PLAIN_ID = re.compile(r"[\w.-]+", re.ASCII)

#: Time after which a worker's notes expire, in seconds; longer than any batch runs. A fenced worker
#: may write a note that nobody ever removes.
RUNNING_TTL_S = 24 * 3600

#: How many workers may end while they read a message alone; then it becomes a dead letter.
MAX_DELIVERY_DEATHS = 2

#: Field of the note of what a worker reads, among the notes of its batches.
DELIVERY = "delivery"


class Deaths(NamedTuple):
    """Workers that died while they ran a suspect."""

    #: How many, while it ran alone.
    alone: int
    #: How many jobs ran together if only one died, while several ran; 0 if it ran alone since.
    group_size: int = 0


class RunningBatches:
    """Notes of running batches, sent on their own connection; for one thread."""

    def __init__(self, client: "redis.Redis", keys: Keys) -> None:
        self._pool: Any = client.connection_pool
        self._keys = keys
        self._connection: Any = None
        self._numbers = count(1)
        #: Batches that ended. They can wait for the next command: recovery ignores jobs whose
        #: leases are gone.
        self._ended: list[int] = []

    def began(
        self,
        worker: str,
        jobs: Mapping[str, str],
        *,
        alone: bool,
        in_slots: bool = False,
    ) -> int:
        """Notes a batch that is about to run; see `LeaseStore.began`.

        Args:
            worker: Id of this worker.
            jobs: Task id by token.
            alone: Whether no other job runs meanwhile.
            in_slots: Whether others do on this device, and are suspects together with these.
        """
        batch = next(self._numbers)
        words = ["alone" if alone else "slots" if in_slots else "shared"]
        for token, task_id in jobs.items():
            words += (token, encode_id(task_id))
        key = self._keys.running(worker)
        commands: list[tuple[str | int, ...]] = []
        if self._ended:
            commands.append(("HDEL", key, *self._ended))
        commands += ("HSET", key, batch, " ".join(words)), ("EXPIRE", key, RUNNING_TTL_S)
        try:
            self._send(commands)
            self._ended = []
        except (redis.RedisError, OSError) as error:
            # The batch runs nevertheless, and nobody is blamed for what may happen.
            logger.debug("the note of a batch cannot be sent: %r", error)
            self.drop_connection()
        return batch

    def ended(self, batch: int) -> None:
        """Notes that a batch has left its device; Redis learns it with the next batch."""
        self._ended.append(batch)
        # Check the connection now, so that the next batch need not wait for it.
        if self._connection is not None and not self._is_well():
            self.drop_connection()

    def drop(self) -> None:
        """Forgets what was not sent, because the worker is fenced."""
        self._ended = []

    def drop_connection(self) -> None:
        """Gives the connection back; the next note connects anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _send(self, commands: Sequence[Sequence[str | int]]) -> None:
        if self._connection is not None and not self._is_well():
            self.drop_connection()
        if self._connection is None:
            # The pool checks each connection that it hands out.
            self._connection = self._pool.get_connection()
        self._connection.send_packed_command((packed(*commands),), check_health=False)

    def _is_well(self) -> bool:
        """Reads the answers to earlier notes; False if the connection broke or cannot be used."""
        with suppress(redis.ConnectionError, redis.TimeoutError, OSError):
            while self._connection.can_read(timeout=0):
                try:
                    self._connection.read_response()
                except redis.ReadOnlyError:
                    # After a failover the address may be another server's.
                    return False
                except redis.ResponseError as error:
                    logger.debug("a note of a batch was refused: %r", error)
            return True
        return False


def encode_id(task_id: str) -> str:
    """Quotes a task id as one word: a client may send an id with spaces or invalid Unicode."""
    return task_id if PLAIN_ID.fullmatch(task_id) else quote(task_id, errors="surrogatepass")


def build_delivery_field(suspect: str) -> str:
    """The field of a suspect's deaths by delivery; no field of a suspect itself has a colon."""
    return f"{DELIVERY}:{suspect}"


def build_expired_field(suspect: str) -> str:
    """The field of the hard time limit that a job has reached, in seconds."""
    return f"expired:{suspect}"


def build_items_field(suspect: str) -> str:
    """The field of the places of items that a suspect has begun one by one, with spaces between."""
    return f"items:{suspect}"


def read_deaths(value: bytes) -> Deaths:
    """Reads the value of a suspect's field, which is the size of the group below zero."""
    number = int(value)
    return Deaths(max(0, number), max(0, -number))


def build_suspect_field(payload: Mapping[str, Any]) -> str:
    """The field that a message would have in the HASH of suspects; its headers may be malformed."""
    headers = payload.get("headers")
    return encode_id(str(headers.get("id"))) if isinstance(headers, Mapping) else ""
