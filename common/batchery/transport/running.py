"""Which batches are on this worker's devices, so that its death can be told from theirs.

Redis is told before a batch leaves, and nobody waits for its answer: once sent, a note outlives the
process. An answer costs a tenth of a millisecond, and the event loop pays for every batch.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import redis

from batchery.transport.keys import Keys
from batchery.transport.notes import spell_id

logger = logging.getLogger("batchery.transport")

#: After which time, in seconds, a worker's notes go away by themselves: a fenced worker may write
#: one for which nobody else looks. Longer than any batch runs.
RUNNING_TTL_S = 24 * 3600

#: Most notes that wait for a Redis that is away; older ones are dropped. More batches than these
#: are on no worker's devices.
MAX_WAITING = 64

_Command = tuple[str | int, ...]


class Running:
    """Notes on a connection of its own; for one thread."""

    def __init__(self, client: "redis.Redis", keys: Keys) -> None:
        """Connects with the first note."""
        self._pool: Any = client.connection_pool
        self._keys = keys
        self._connection: Any = None
        self._numbers = count(1)
        self._waiting: deque[_Command] = deque(maxlen=MAX_WAITING)
        #: Not worth a message: recovery looks only at jobs whose leases are still there.
        self._ended: list[int] = []

    def began(
        self, worker: str, jobs: Mapping[str, str], *, alone: bool, cleared: Sequence[str] = ()
    ) -> int:
        """Notes a batch that is about to run; see `Ledger.began`.

        Args:
            worker: Its id.
            jobs: Task id by token.
            alone: Whether there is no other job beside.
            cleared: Suspects that are none any more. Told now, as this batch may end the worker.
        """
        batch = next(self._numbers)
        words = ["alone" if alone else "shared"]
        for token, task_id in jobs.items():
            words += (token, spell_id(task_id))
        key = self._keys.running(worker)
        if cleared:
            self._waiting.append(("HDEL", self._keys.suspects, *cleared))
        if self._ended:
            self._waiting.append(("HDEL", key, *self._ended))
            self._ended = []
        self._waiting.append(("HSET", key, batch, " ".join(words)))
        self._waiting.append(("EXPIRE", key, RUNNING_TTL_S))
        try:
            self._send()
        except (redis.RedisError, OSError) as error:
            # The batch runs all the same. The broker's own connection will notice, too.
            logger.debug("no note of a batch: %r", error)
            self.drop_connection()
        return batch

    def ended(self, batch: int) -> None:
        """The batch is on no device any more; told with the next one."""
        self._ended.append(batch)
        # Now, as the next batch is in a hurry.
        if self._connection is not None and not self._is_well():
            self.drop_connection()

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._waiting.clear()
        self._ended = []

    def drop_connection(self) -> None:
        """Leaves Redis; the next note connects anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _send(self) -> None:
        if self._connection is not None and not self._is_well():
            self.drop_connection()
        if self._connection is None:
            # It looks at a connection before it lends it out.
            self._connection = self._pool.get_connection()
        packed = self._connection.pack_commands(self._waiting)
        self._connection.send_packed_command(packed, check_health=False)
        self._waiting.clear()

    def _is_well(self) -> bool:
        """Reads the answers to earlier notes; False if the connection broke or cannot be used."""
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError, OSError):
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
