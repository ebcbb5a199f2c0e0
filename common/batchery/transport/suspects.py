"""Who may have killed a worker: which batches are on its devices, and which jobs are cleared.

Redis is told before a batch leaves for a device, and nobody waits for its answer: once sent, a note
outlives the process. Waiting would cost a tenth of a millisecond of the event loop per batch.
"""

import json
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count, islice
from typing import Any
from urllib.parse import quote

import redis

from batchery.redis_scripts import RedisScripts
from batchery.transport.redis_schema import Keys

logger = logging.getLogger("batchery.transport")

#: Ids that are written as they are; almost every task id is one.
PLAIN_ID = re.compile(r"[\w.-]+", re.ASCII)

#: Maximum number of jobs of one script; Redis answers nobody else meanwhile.
MAX_COMPLETED_PER_SCRIPT = 500

#: Time after which a worker's notes go away by themselves, in seconds: a fenced worker may write a
#: note that nobody looks for. Longer than any batch runs.
RUNNING_TTL_S = 24 * 3600

#: Maximum number of commands that wait for a Redis that is away; older ones are dropped. A worker
#: has fewer batches than that on its devices.
MAX_WAITING_COMMANDS = 64

_Command = tuple[str | int, ...]


class AckBookkeeping:
    """What Redis is told along with acknowledgements, as a round trip of its own costs 0.1 ms."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        #: Fields among the suspects.
        self._cleared: deque[str] = deque()
        #: Token of each message that is acknowledged together with its dedupe keys, and their key.
        self._completed: deque[tuple[str, str]] = deque()
        #: Token and description of each message that becomes a dead letter.
        self._dead_letters: deque[tuple[str, Mapping[str, Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether something must not wait for the next acknowledgement."""
        return bool(self._cleared or self._completed or self._dead_letters)

    def cleared(self, suspect: str) -> None:
        """Notes that a suspect is settled: its deaths need not be known any more."""
        self._cleared.append(suspect)

    def take_cleared(self) -> list[str]:
        """Returns the suspects that are cleared and not told yet; the caller must tell Redis."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._cleared.popleft())
        return taken

    def completed(self, token: str, publish_tag: str) -> None:
        """Notes an acknowledgement, with which the job's dedupe keys go."""
        self._completed.append((token, self._keys.dedupe_keys(publish_tag)))

    def dead_lettered(self, token: str, letter: Mapping[str, Any]) -> None:
        """Notes that a message becomes a dead letter."""
        self._dead_letters.append((token, letter))

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._cleared.clear()
        self._completed.clear()
        self._dead_letters.clear()

    @contextmanager
    def sent_by(self, pipe: Any) -> Iterator[None]:
        """Adds the cleared suspects to a pipeline that the block runs; keeps them if it fails."""
        cleared = self.take_cleared()
        if cleared:
            pipe.hdel(self._keys.suspects, *cleared)
        try:
            yield
        except BaseException:
            self._cleared.extend(cleared)
            raise

    def send_completed(self, scripts: RedisScripts, lease_key: str) -> None:
        """Acknowledges messages and removes their dedupe keys.

        Raises:
            redis.RedisError: Redis does not answer; the rest goes on waiting.
        """
        while some := list(islice(self._completed.copy(), MAX_COMPLETED_PER_SCRIPT)):
            tokens, dedupe_keys = zip(*some, strict=True)
            scripts.run("ack_published", [lease_key, *dedupe_keys], *tokens)
            for _ in some:
                self._completed.popleft()

    def send_dead_letters(self, scripts: RedisScripts, lease_key: str) -> None:
        """Moves messages to the dead letters.

        Raises:
            redis.RedisError: Redis does not answer, or has no room; the rest goes on waiting.
        """
        keys = [lease_key, self._keys.dead, self._keys.dead_messages]
        while self._dead_letters:
            token, letter = self._dead_letters[0]
            scripts.run("dead_letter", keys, token, json.dumps(letter))
            self._dead_letters.popleft()


class RunningBatches:
    """Notes of running batches, sent on a connection of their own; for one thread."""

    def __init__(self, client: "redis.Redis", keys: Keys) -> None:
        """Connects with the first note."""
        self._pool: Any = client.connection_pool
        self._keys = keys
        self._connection: Any = None
        self._numbers = count(1)
        self._waiting: deque[_Command] = deque(maxlen=MAX_WAITING_COMMANDS)
        #: Batches that ended. They are worth no message of their own: recovery looks only at jobs
        #: whose leases are still there.
        self._ended: list[int] = []

    def began(
        self, worker: str, jobs: Mapping[str, str], *, alone: bool, cleared: Sequence[str] = ()
    ) -> int:
        """Notes a batch that is about to run; see `LeaseStore.began`.

        Args:
            worker: Id of this worker.
            jobs: Task id by token.
            alone: Whether no other job runs meanwhile.
            cleared: Suspects that are none any more. Redis is told now, as this batch may end the
                worker.
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
        """Notes that a batch is on no device any more; Redis is told with the next batch."""
        self._ended.append(batch)
        # The connection is checked now, as the next batch is in a hurry.
        if self._connection is not None and not self._is_well():
            self.drop_connection()

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._waiting.clear()
        self._ended = []

    def drop_connection(self) -> None:
        """Gives the connection back; the next note connects anew."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _send(self) -> None:
        if self._connection is not None and not self._is_well():
            self.drop_connection()
        if self._connection is None:
            # The pool checks a connection before it lends it out.
            self._connection = self._pool.get_connection()
        packed = self._connection.pack_commands(self._waiting)
        self._connection.send_packed_command(packed, check_health=False)
        self._waiting.clear()

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


def spell_id(task_id: str) -> str:
    """Spells a task id as one word: anybody can send an id with a space, or with no Unicode."""
    return task_id if PLAIN_ID.fullmatch(task_id) else quote(task_id, errors="surrogatepass")


def suspect_of(payload: Mapping[str, Any]) -> str:
    """The field that a message would have among the suspects, whatever is in its headers."""
    headers = payload.get("headers")
    return spell_id(str(headers.get("id"))) if isinstance(headers, Mapping) else ""
