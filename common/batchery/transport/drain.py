"""How a channel asks for messages, and how it makes Redis tell when there are some."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import redis
from kombu.utils.encoding import bytes_to_str

from batchery.transport.inbox import Inbox
from batchery.transport.ledger import Ledger
from batchery.transport.scripts import source

logger = logging.getLogger("batchery.transport")

#: Most bytes that one drain takes, in bytes; Redis answers nobody else while it copies them.
DRAIN_BYTES = 16 * 2**20


class Fenced(redis.ConnectionError):
    """Another worker took this one's leases over; Celery starts its consumer anew."""


def leave_fenced(ledger: Ledger) -> NoReturn:
    """Begins anew as another worker.

    Raises:
        Fenced: Always.
        redis.RedisError: Redis does not answer.
    """
    lost = ledger.rejoin()
    logger.warning("this worker was silent for too long: its leases were handed on, %d jobs", lost)
    raise Fenced(f"{lost} jobs were handed on to other workers")


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Makes a lost connection of what Redis refuses: else that would end Celery's worker.

    It is READONLY after a failover, or MISCONF where the disk is full. It passes.
    """
    try:
        yield
    except redis.exceptions.NoScriptError:
        raise
    except redis.ResponseError as error:
        raise redis.ConnectionError(f"the broker refuses to serve: {error}") from error


class Drain:
    """Commands of one channel on its connection; when they are sent, the channel says."""

    def __init__(self, channel: Any, ledger: Ledger, inbox: Inbox) -> None:
        self._channel = channel
        self._ledger = ledger
        self._inbox = inbox
        self._sha = ""
        self._commands: tuple[Any, ...] = ()
        self._packed: list[bytes] = []
        #: What the last one asked, in order.
        self.keys: tuple[str, ...] = ()
        #: Whether the last one left out queues that had their share.
        self.left_some_out = False
        self._queues: frozenset[str] = frozenset()
        #: Whether the last one also asked to be told of changes, and how many messages it wanted.
        self.watches = False
        self._wanted = 0
        #: Whether the last one left its queues empty; then Redis tells when one of them changes.
        self.took_all = False
        #: Whether the last one brought as much as it wanted: then there is more, most likely.
        self._brought_much = False

    def prepare(self, connection: Any) -> None:
        """Makes a fresh connection ready: it shall be told of changes, and know the script."""
        # Only what is asked for by CLIENT CACHING: the script reads the heartbeats, too.
        connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
        connection.read_response()
        connection.send_command("SCRIPT", "LOAD", source("drain"))
        self._sha = bytes_to_str(connection.read_response())

    def ask(self, connection: Any) -> bool:
        """Sends the question, whose answer is the script's; False if no queue may give anything."""
        channel, keys = self._channel, self._ledger.keys
        free = min(channel.qos.free, channel.drain_messages)
        limits = self._limits(free)
        queues = [queue for queue, limit in limits.items() if limit > 0]
        if not queues:
            return False
        self._ledger.flush()
        self._queues = frozenset(channel.active_queues)
        self.left_some_out = len(queues) < len(self._queues)
        self.keys = tuple(
            keys.queue(channel._q_for_pri(queue, step))
            for step in channel.priority_steps
            for queue in queues
        )
        fixed = [keys.workers, self._ledger.lease_key, keys.token, keys.suspects]
        script = (
            *("EVALSHA", self._sha, len(fixed) + len(self.keys)),
            *fixed,
            *self.keys,
            *(self._ledger.worker, free, DRAIN_BYTES, len(queues)),
            *(limits[queue] for queue in queues),
        )
        self._wanted = min(free, sum(limits[queue] for queue in queues))
        self.watches = not self._brought_much
        # In one round trip: a lonely job's worker waits again before the job is on its device.
        commands = (script, *self._watching()) if self.watches else (script,)
        if commands != self._commands:
            # An idle worker asks the same again and again, each time in a hurry.
            self._commands, self._packed = commands, connection.pack_commands(commands)
        connection.send_packed_command(self._packed)
        return True

    def _watching(self) -> list[tuple[str, ...]]:
        return [("CLIENT", "CACHING", "YES"), ("EXISTS", *self.keys)]

    def read(self, connection: Any) -> Any:
        """The script's answer: messages, an empty list, or None if this worker is fenced.

        Raises:
            redis.ResponseError: Redis refuses the script.
            redis.ConnectionError: The connection broke.
        """
        answer: Any = None
        refusal: redis.ResponseError | None = None
        try:
            answer = connection.read_response()
        except redis.ResponseError as error:
            # The other answers come all the same.
            refusal = error
        self._brought_much = len(answer or ()) // 2 - 1 >= self._wanted
        self.took_all = self.watches and self._is_watched(connection)
        if refusal is not None:
            raise refusal
        return answer

    def _limits(self, free: int) -> dict[str, int]:
        """How many messages each queue may give, in the order in which they take turns."""
        channel = self._channel
        held: Counter[str] = Counter()
        if channel.queue_prefetch:
            for key, count in self._ledger.leases.by_key().items():
                held[self._inbox.queue_of(key)] += count
        return {
            queue: min(free, channel.queue_prefetch.get(queue, free + held[queue]) - held[queue])
            for queue in channel._queue_cycle.consume(len(channel.active_queues))
        }

    def nothing_came(self, connection: Any) -> bool:
        """Whether all queues are empty; from now on Redis tells when one of them changes."""
        connection.send_packed_command(connection.pack_commands(self._watching()))
        return self._is_watched(connection)

    def _is_watched(self, connection: Any) -> bool:
        connection.read_response()
        if connection.read_response() or self._queues != set(self._channel.active_queues):
            return False
        # What was pushed behind the answer may sit in the parser already: no event would come.
        return not connection.can_read(timeout=0)
