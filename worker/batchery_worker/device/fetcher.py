"""How a device asks one broker for messages, many at once.

While there is nothing to take, nothing is popped: Redis tracks the queues' keys for the device's
connection, and says when one of them changes. A device that finds its queues empty, and could begin
a job at once, is entered in Redis as waiting. While it is there, others give back what they hold.
"""

import json
import logging
from bisect import bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import redis
from kombu.utils.encoding import bytes_to_str

from batchery.redis_scripts import packed, script_text
from batchery.retry import find_refusal
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import LUA, fetched_lists

logger = logging.getLogger("batchery.device")

#: Maximum number of bytes that one fetch takes; Redis answers nobody else while it copies them.
MAX_FETCH_BYTES = 16 * 2**20


class Workload(Protocol):
    """The jobs that are here, and how many more are wanted."""

    def count_free(self) -> int:
        """How many jobs could begin at once."""

    def limit_for(self, queue: str, level: int) -> int:
        """How many more jobs of a queue to take, of the class that begins at a priority."""

    def find_jobs(self, queue: str) -> Hashable:
        """Which jobs `limit_for` counts: all queues by which the same ones come share a limit."""


class Queues(Protocol):
    """The queues of a device, and how their lists are named; the last names are kombu's."""

    @property
    def names(self) -> Sequence[str]:
        """All that it takes from."""

    @property
    def levels(self) -> Sequence[int]:
        """First priority of each class; none for one class."""

    @property
    def workload(self) -> Workload | None:
        """None before anything is known of jobs."""

    @property
    def cycle(self) -> Any:
        """Kombu's, of whose turn it is."""

    @property
    def sep(self) -> str:
        """What stands between a queue and a priority step."""

    @property
    def priority_steps(self) -> Sequence[int]:
        """All of them."""

    def _q_for_pri(self, queue: str, pri: int) -> str:
        """Key of a queue's priority step, without the prefix."""


class Part(NamedTuple):
    """The lists of one queue and priority class: a flood of one class keeps out no other."""

    queue: str
    #: First priority of the class.
    level: int


class FetchRequest(NamedTuple):
    """All that decides which words a fetch has."""

    holder: str
    limits: tuple[tuple[Sequence[Part], int], ...]
    #: How many jobs could begin at once.
    free: int
    #: Whether Redis is asked to tell of changes, too.
    watches: bool


class EncodedFetch(NamedTuple):
    """A question in the words of Redis."""

    #: The keys that are asked, in order.
    keys: tuple[str, ...]
    commands: bytes


class SentFetch(NamedTuple):
    """A question as it was sent, and what must be known to understand its answer."""

    question: FetchRequest
    spelled: EncodedFetch
    #: Names of the queues, in the order of their turns.
    queues: tuple[str, ...]
    #: Whether queues and room decide all of it, as the device holds nothing.
    is_idle: bool
    #: How many messages it wants.
    messages: int


class Fetcher:
    """The commands by which a device asks for messages; the device says when they are sent."""

    def __init__(self, queues: Queues, store: LeaseStore) -> None:
        self._queues = queues
        self._store = store
        self._sha = ""
        #: The last question: an idle device asks it again and again.
        self._known: SentFetch | None = None
        self._asked: SentFetch | None = None
        self._asked_s = 0.0
        #: The parts of each queue.
        self._parts: dict[str, Sequence[Part]] = {}
        #: Whether this device is entered in Redis as waiting.
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
        self.is_entered = False
        self._known = None
        # Only keys asked for by CLIENT CACHING are tracked: the script reads heartbeats as well.
        connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
        connection.read_response()
        connection.send_command("SCRIPT", "LOAD", script_text(LUA, "fetch"))
        self._sha = bytes_to_str(connection.read_response())

    def ask(self, connection: Any) -> bool:
        """Sends the question, whose answer is the script's; False if no queue may give anything."""
        names = tuple(self._queues.cycle.consume(len(self._queues.names)))
        workload, watches = self._queues.workload, not self._brought_much
        if workload is None:
            return False
        free = workload.count_free()
        asked = self._known
        if asked is None or not self._is_as_then(asked, names, free, watches=watches):
            asked = self._anew(workload, names, free, watches=watches)
            if asked is None:
                return False
            self._known = asked
        self._store.flush()
        self._asked, self._asked_s = asked, perf_counter()
        connection.send_packed_command((asked.spelled.commands,))
        return True

    def _is_as_then(
        self, asked: SentFetch, names: tuple[str, ...], free: int, *, watches: bool
    ) -> bool:
        """Whether a question can be asked again as it was, without working it out."""
        question = asked.question
        return (
            asked.is_idle
            and not self._store.leases
            and (question.holder, asked.queues, question.free, question.watches)
            == (self._store.worker, names, free, watches)
        )

    def _anew(
        self, workload: Workload, names: tuple[str, ...], free: int, *, watches: bool
    ) -> SentFetch | None:
        """Works a question out; None if no queue may give anything."""
        # Parts are put together whose limit is the same, as the same jobs come by them.
        joint = dict[tuple[Hashable, int, int], list[Part]]()
        for part in (part for name in names for part in self._find_parts(name)):
            if (limit := workload.limit_for(*part)) > 0:
                key = (workload.find_jobs(part.queue), part.level, limit)
                joint.setdefault(key, []).append(part)
        if not joint:
            return None
        limits = tuple((tuple(parts), limit) for (_, _, limit), parts in joint.items())
        question = FetchRequest(self._store.worker, limits, free, watches)
        known = self._known
        return SentFetch(
            question,
            spelled=(
                known.spelled
                if known is not None and known.question == question
                else self._encode(question)
            ),
            queues=names,
            is_idle=not self._store.leases,
            messages=sum(limit for _, limit in limits),
        )

    def _encode(self, question: FetchRequest) -> EncodedFetch:
        source, key_of = self._queues, self._store.keys.queue
        numbers = {
            part: number for number, (parts, _) in enumerate(question.limits, 1) for part in parts
        }
        queues = list(dict.fromkeys(part.queue for part in numbers))
        lists = [
            ([key_of(key) for key in fetched_lists(source, queue, step)], number)
            for step in source.priority_steps
            for queue in queues
            if (number := numbers.get(self._find_part(queue, step)))
        ]
        names = (
            *(own[0] for own, _ in lists),
            *(key for own, _ in lists for key in own[1:]),
        )
        fixed = self._own_keys(question.holder)
        # By the keys of their first steps, by which others know the queues of what they hold.
        first = source.priority_steps[0]
        entry = [question.free, [key_of(source._q_for_pri(queue, first)) for queue in queues]]
        script = (
            *("EVALSHA", self._sha, len(fixed) + len(names)),
            *fixed,
            *names,
            *(question.holder, MAX_FETCH_BYTES, json.dumps(entry) if question.free else ""),
            *(len(question.limits), *(limit for _, limit in question.limits)),
            *(number for _, number in lists),
        )
        # Both in one round trip: a lonely job's device waits again before the job has begun.
        commands = [script, *watching(names)] if question.watches else [script]
        return EncodedFetch(names, packed(*commands))

    def read(self, connection: Any) -> Any:
        """Reads the script's answer: messages, an empty list, or None if this device is fenced.

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
        took = self._store.scripts.times["fetch"]
        took.calls += 1
        took.seconds += perf_counter() - self._asked_s
        self.is_entered = answer == [] and asked.question.free > 0
        self._brought_much = len(answer or ()) // 2 - 1 >= asked.messages
        self.took_all = self.watches and self._is_watched(connection)
        if refusal is not None:
            if find_refusal(refusal) == "WRONGTYPE":
                self._log_wrong_types(asked.question.holder, refusal)
            raise refusal
        return answer

    def _log_wrong_types(self, holder: str, refusal: redis.ResponseError) -> None:
        """Names the keys that something else has written: Redis does not say which ones."""
        client, found = self._store.client, False
        for key, kind in self._own_keys(holder).items():
            if (other := bytes_to_str(client.type(key))) not in (kind, "none"):
                found = True
                logger.error(
                    "key %s of Redis is a %s, not a %s: something else has written it, and no job"
                    " is fetched until it is gone; look at it, then run redis-cli DEL %s",
                    *(key, other, kind, key),
                )
        if not found:
            logger.error("Redis refuses to fetch: %s", refusal)

    def _own_keys(self, holder: str) -> Mapping[str, str]:
        """The script's keys before those of the queues, in its order, and their types."""
        store, keys = self._store, self._store.keys
        return {
            keys.workers: "zset",
            store.lease_key: "hash",
            keys.token: "string",
            keys.suspects: "hash",
            keys.waiting: "hash",
            keys.running(holder): "hash",
        }

    def _find_parts(self, queue: str) -> Collection[Part]:
        if queue not in self._parts:
            steps = self._queues.priority_steps
            self._parts[queue] = tuple(dict.fromkeys(self._find_part(queue, n) for n in steps))
        return self._parts[queue]

    def _find_part(self, queue: str, step: int) -> Part:
        levels = self._queues.levels
        return Part(queue, levels[max(0, bisect_right(levels, step) - 1)] if levels else 0)

    def _is_watched(self, connection: Any) -> bool:
        connection.read_response()
        asked = () if self._asked is None else self._asked.queues
        if connection.read_response() or set(asked) != set(self._queues.names):
            return False
        # A push right behind the answer may be in the parser already: then no event would come.
        return not connection.can_read(timeout=0)


def watching(keys: Sequence[str]) -> list[tuple[str, ...]]:
    """The commands that ask whether there is something in lists, and to be told of changes."""
    return [("CLIENT", "CACHING", "YES"), ("EXISTS", *keys)]
