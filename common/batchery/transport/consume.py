"""How a channel asks Redis for messages, many at once.

While there is nothing to take, nothing is popped: Redis tracks the queues' keys for the channel's
connection, and says when one of them changes.
"""

import contextlib
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import redis
from kombu.utils.encoding import bytes_to_str

from batchery.redis_scripts import packed, script_text
from batchery.retry import find_refusal
from batchery.transport.inbox import Capacity, Consumer, Inbox, encode_entry
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import LUA, fetched_lists

logger = logging.getLogger("batchery.transport")

#: Maximum number of bytes that one fetch takes; Redis answers nobody else while it copies them.
MAX_FETCH_BYTES = 16 * 2**20


class Part(NamedTuple):
    """The lists of one queue and priority class: a flood of one class keeps out no other."""

    queue: str
    #: First priority of the class.
    level: int


class FetchRequest(NamedTuple):
    """All that decides which words a fetch has."""

    worker: str
    #: Maximum number of messages.
    free: int
    limits: tuple[tuple[Sequence[Part], int], ...]
    #: What the worker could begin; nothing where nobody tells of its jobs.
    capacity: Capacity
    #: Whether Redis is asked to tell of changes, too.
    watches: bool


class EncodedFetch(NamedTuple):
    """A question in the words of Redis."""

    #: The keys that are asked, in order.
    keys: tuple[str, ...]
    #: How this worker is entered in Redis if there is nothing.
    entry: str
    commands: bytes


class SentFetch(NamedTuple):
    """A question as it was sent, and what must be known to understand its answer."""

    question: FetchRequest
    spelled: EncodedFetch
    #: Names of the queues, in the order of their turns.
    queues: tuple[str, ...]
    #: Whether queues were left out that had their share.
    left_some_out: bool
    #: Whether queues, room and capacity decide all of it, as the worker holds nothing.
    is_idle: bool
    #: How many messages it wants.
    messages: int


class Fetcher:
    """The commands by which a channel asks for messages; the channel says when they are sent."""

    def __init__(self, channel: Consumer, lease_store: LeaseStore, inbox: Inbox) -> None:
        self._channel = channel
        self._lease_store = lease_store
        self._inbox = inbox
        self._sha = ""
        #: The last question: an idle worker asks it again and again.
        self._known: SentFetch | None = None
        self._asked: SentFetch | None = None
        self._asked_s = 0.0
        #: The parts of each queue.
        self._parts: dict[str, Sequence[Part]] = {}
        #: Whether the last fetch left out queues that had their share.
        self.left_some_out = False
        #: Whether this worker is entered in Redis as waiting.
        self.is_entered = False
        #: Whether the last fetch left its queues empty; then Redis tells when one of them changes.
        self.took_all = False
        #: Whether the last fetch brought as much as it wanted; then there is probably more.
        self._brought_much = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the last fetch asked, in order."""
        return () if self._asked is None else self._asked.spelled.keys

    @property
    def watches(self) -> bool:
        """Whether the last fetch also asked to be told of changes."""
        return self._asked is not None and self._asked.question.watches

    def prepare(self, connection: Any) -> None:
        """Prepares a fresh connection: Redis must tell it of changes, and know the script."""
        self.forget_entry()
        self._known = None
        # Only keys asked for by CLIENT CACHING are tracked: the script reads heartbeats as well.
        connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
        connection.read_response()
        connection.send_command("SCRIPT", "LOAD", script_text(LUA, "fetch"))
        self._sha = bytes_to_str(connection.read_response())

    def ask(self, connection: Any) -> bool:
        """Sends the question, whose answer is the script's; False if no queue may give anything."""
        channel = self._channel
        free = min(channel.qos.free, channel.fetch_messages)
        queues = tuple(channel._queue_cycle.consume(len(channel.active_queues)))
        watches = not self._brought_much
        asked = self._known
        if asked is None or not self._is_as_then(asked, free, queues, watches):
            asked = self._anew(free, queues, watches)
            if asked is None:
                return False
            self._known = asked
        self._lease_store.flush()
        self._asked, self.left_some_out = asked, asked.left_some_out
        self._asked_s = perf_counter()
        connection.send_packed_command((asked.spelled.commands,))
        return True

    def _is_as_then(
        self, asked: SentFetch, free: int, queues: tuple[str, ...], watches: bool
    ) -> bool:
        """Whether a question can be asked again as it was, without working it out."""
        question = asked.question
        return (
            asked.is_idle
            and not self._lease_store.leases
            and (question.worker, question.free, asked.queues, question.watches)
            == (self._lease_store.worker, free, queues, watches)
            and question.capacity == self._capacity()
        )

    def _anew(self, free: int, queues: tuple[str, ...], watches: bool) -> SentFetch | None:
        """Works a question out; None if no queue may give anything."""
        all_limits = self._limits(free, queues)
        limits = self._join({part: limit for part, limit in all_limits.items() if limit > 0})
        if not limits:
            return None
        capacity = self._capacity()
        question = FetchRequest(self._lease_store.worker, free, limits, capacity, watches)
        known = self._known
        if known is not None and known.question == question:
            spelled = known.spelled
        else:
            spelled = self._encode(question)
        return SentFetch(
            question,
            spelled,
            queues,
            left_some_out=sum(len(parts) for parts, _ in limits) < len(all_limits),
            is_idle=not self._lease_store.leases,
            messages=min(free, sum(limit for _, limit in limits)),
        )

    def _capacity(self) -> Capacity:
        workload = self._channel.workload
        return Capacity() if workload is None else workload.capacity()

    def _encode(self, question: FetchRequest) -> EncodedFetch:
        channel, keys = self._channel, self._lease_store.keys
        numbers = {
            part: number for number, (parts, _) in enumerate(question.limits, 1) for part in parts
        }
        queues = list(dict.fromkeys(part.queue for part in numbers))
        lists = [
            ([keys.queue(key) for key in fetched_lists(channel, queue, step)], number)
            for step in channel.priority_steps
            for queue in queues
            if (number := numbers.get(find_part(channel, queue, step)))
        ]
        names = (
            *(own[0] for own, _ in lists),
            *(key for own, _ in lists for key in own[1:]),
        )
        fixed = self._own_keys(question.worker)
        entry = self._entry(question, queues)
        script = (
            *("EVALSHA", self._sha, len(fixed) + len(names)),
            *fixed,
            *names,
            *(question.worker, question.free, MAX_FETCH_BYTES, entry),
            *(len(question.limits), *(limit for _, limit in question.limits)),
            *(number for _, number in lists),
        )
        # Both in one round trip: a lonely job's worker waits again before the job is on its device.
        commands = [script, *watching(names)] if question.watches else [script]
        return EncodedFetch(names, entry, packed(*commands))

    def _entry(self, question: FetchRequest, queues: Sequence[str]) -> str:
        """How this worker is entered in Redis if it finds nothing."""
        channel, workload = self._channel, self._channel.workload
        if workload is None:
            return ""
        first_step, name = channel.priority_steps[0], self._lease_store.keys.queue
        return encode_entry(
            question.capacity,
            {
                name(channel._q_for_pri(queue, first_step)): workload.find_kinds(queue)
                for queue in queues
            },
        )

    def forget_entry(self) -> None:
        """Notes that this worker is not entered in Redis as waiting."""
        self.is_entered = False

    def read(self, connection: Any) -> Any:
        """Reads the script's answer: messages, an empty list, or None if this worker is fenced.

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
        asked = self._asked
        assert asked is not None
        took = self._lease_store.scripts.times["fetch"]
        took.calls += 1
        took.seconds += perf_counter() - self._asked_s
        if answer == []:
            self.is_entered = bool(asked.spelled.entry)
        else:
            self.forget_entry()
        brought = len(answer or ()) // 2 - 1
        self._brought_much = brought >= asked.messages
        self.took_all = self.watches and self._is_watched(connection)
        if refusal is not None:
            if find_refusal(refusal) == "WRONGTYPE":
                self._log_wrong_types(asked.question.worker, refusal)
            raise refusal
        return answer

    def _log_wrong_types(self, worker: str, refusal: redis.ResponseError) -> None:
        """Names the keys that something else has written: Redis does not say which ones."""
        client, found = self._lease_store.client, False
        for key, kind in self._own_keys(worker).items():
            if (other := bytes_to_str(client.type(key))) not in (kind, "none"):
                found = True
                logger.error(
                    "key %s of Redis is a %s, not a %s: something else has written it, and no job"
                    " is fetched until it is gone; look at it, then run redis-cli DEL %s",
                    *(key, other, kind, key),
                )
        if not found:
            logger.error("Redis refuses to fetch: %s", refusal)

    def _own_keys(self, worker: str) -> dict[str, str]:
        """The script's keys before those of the queues, in its order, and their types."""
        store, keys = self._lease_store, self._lease_store.keys
        return {
            keys.workers: "zset",
            store.lease_key: "hash",
            keys.token: "string",
            keys.suspects: "hash",
            keys.waiting: "hash",
            keys.running(worker): "hash",
        }

    def _limits(self, free: int, queues: Sequence[str]) -> dict[Part, int]:
        """How many messages each part may give, in the order in which queues take turns."""
        channel, leases = self._channel, self._lease_store.leases
        parts = [part for queue in queues for part in self._find_parts(queue)]
        held: Counter[Part] = Counter()
        if leases and channel.queue_prefetch:
            for key, count in leases.by_key().items():
                held[find_part(channel, *self._inbox.find_place(key))] += count
            for key, count in self._inbox.count_scheduled().items():
                # These may wait for days.
                held[find_part(channel, *self._inbox.find_place(key))] -= count
        limits = dict.fromkeys(parts, free)
        for part in parts:
            if part.queue in channel.queue_prefetch:
                limits[part] = min(free, channel.queue_prefetch[part.queue] - held[part])
        if (workload := channel.workload) is not None:
            for part, known in limits.items():
                if (limit := workload.limit_for(part.queue, part.level)) is not None:
                    limits[part] = min(known, limit)
        return limits

    def _join(self, limits: Mapping[Part, int]) -> tuple[tuple[Sequence[Part], int], ...]:
        """Puts parts together whose limit is the same, as the same jobs come by them."""
        workload, joint = self._channel.workload, dict[Any, list[Part]]()
        for part, limit in limits.items():
            jobs = None
            if workload is not None and part.queue not in self._channel.queue_prefetch:
                jobs = workload.find_jobs(part.queue)
            key = part if jobs is None else (jobs, part.level, limit)
            joint.setdefault(key, []).append(part)
        return tuple((tuple(parts), limits[parts[0]]) for parts in joint.values())

    def _find_parts(self, queue: str) -> Sequence[Part]:
        if queue not in self._parts:
            steps = self._channel.priority_steps
            parts = dict.fromkeys(find_part(self._channel, queue, step) for step in steps)
            self._parts[queue] = tuple(parts)
        return self._parts[queue]

    def _is_watched(self, connection: Any) -> bool:
        connection.read_response()
        queues = () if self._asked is None else self._asked.queues
        if connection.read_response() or set(queues) != set(self._channel.active_queues):
            return False
        # A push right behind the answer may be in the parser already: then no event would come.
        return not connection.can_read(timeout=0)


def watching(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The commands that ask whether there is something in lists, and to be told of changes."""
    return [("CLIENT", "CACHING", "YES"), ("EXISTS", *keys)]


def find_part(channel: Consumer, queue: str, step: int) -> Part:
    """The part of a queue that a priority step belongs to; one where no classes are known."""
    levels = channel.class_levels
    if not levels:
        return Part(queue, 0)
    return Part(queue, levels[max(0, bisect_right(levels, step) - 1)])


@contextlib.contextmanager
def refusals_as_lost_connection() -> Iterator[None]:
    """Turns what Redis refuses into a lost connection, as a refusal would end Celery's worker.

    Such a refusal passes: READONLY after a failover, or MISCONF while the disk is full.
    """
    try:
        yield
    except redis.exceptions.NoScriptError:
        raise
    except redis.ResponseError as error:
        raise redis.ConnectionError(f"the broker refuses to serve: {error}") from error


@contextlib.contextmanager
def forgone_if_full() -> Iterator[None]:
    """Lets a note of a queue's binding be missing: consumers need none, and publishers make it."""
    try:
        yield
    except redis.ResponseError as error:
        # Redis 6.2 has no error of its own for what it refuses within a script.
        if find_refusal(error) != "OOM":
            raise
        logger.debug("the binding of a queue is not noted: %s", error)
