"""How a device asks one broker for messages, many at once.

While there is nothing to take, nothing is popped: Redis tracks the queues' keys for the device's
connection, and says when one of them changes. A device that finds its queues empty, and could begin
a job at once, is entered in Redis as waiting. While it is there, others give back what they hold.
"""

import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
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


class Part(NamedTuple):
    """The lists of one queue and priority class: a flood of one class keeps out no other."""

    queue: str
    #: First priority of the class.
    level: int


class FetchRequest(NamedTuple):
    """All that decides which words a fetch has."""

    holder: str
    #: How many messages the parts of each group may give together.
    limits: Sequence[tuple[Sequence[Part], int]]
    #: How many jobs could begin at once.
    free: int
    #: Whether Redis is asked to tell of changes, too.
    watches: bool


class Fetcher:
    """The commands by which a device asks for messages; the device says when they are sent."""

    def __init__(self, channel: Any, store: LeaseStore, levels: Sequence[int]) -> None:
        """Asks nothing yet.

        Args:
            channel: A Redis channel of kombu, which knows how lists are named.
            store: The leases.
            levels: First priority of each class; none for one class.
        """
        self._channel = channel
        self._store = store
        #: The class of each priority step, by its first priority.
        self._levels = {
            step: levels[max(0, bisect_right(levels, step) - 1)] if levels else 0
            for step in channel.priority_steps
        }
        self._classes = tuple(dict.fromkeys(self._levels.values()))
        self._sha = ""
        self._asked: FetchRequest | None = None
        self._asked_s = 0.0
        #: Keys that the last fetch asked, in order, and its words.
        self.keys: tuple[str, ...] = ()
        self._commands = b""
        #: For each of these keys the number of its group in `FetchRequest.limits`, from 1.
        self._groups: Sequence[int] = ()
        #: Whether this device is entered in Redis as waiting.
        self.is_entered = False
        #: Whether the last fetch left its queues empty; then Redis tells when one of them changes.
        self.took_all = False
        #: Whether the last fetch brought as much as it wanted of one class, or more; then there is
        #: probably more.
        self.brought_much = False
        #: Parts that have brought all that was wanted of them: there is probably more.
        self.rich_parts = set[Part]()

    @property
    def watches(self) -> bool:
        """Whether the last fetch also asked to be told of changes."""
        return self._asked is not None and self._asked.watches

    def prepare(self, connection: Any) -> None:
        """Prepares a fresh connection: Redis must tell it of changes, and know the script."""
        self.is_entered = False
        self._asked = None
        # Only keys asked for by CLIENT CACHING are tracked: the script reads heartbeats as well.
        connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
        connection.read_response()
        connection.send_command("SCRIPT", "LOAD", script_text(LUA, "fetch"))
        self._sha = bytes_to_str(connection.read_response())

    def ask(self, connection: Any, queues: Sequence[str], workload: Workload) -> bool:
        """Sends the question, whose answer is the script's; False if no queue may give anything.

        Args:
            connection: To the broker, prepared.
            queues: Names of the queues, in the order of their turns.
            workload: Says how much is wanted of each.
        """
        # Parts are put together whose limit is the same, as the same jobs come by them.
        joint = dict[tuple[Hashable, int, int], list[Part]]()
        for queue in queues:
            for level in self._classes:
                if (limit := workload.limit_for(queue, level)) > 0:
                    same = workload.find_jobs(queue), level, limit
                    joint.setdefault(same, []).append(Part(queue, level))
        if not joint:
            return False
        limits = [(parts, limit) for (_, _, limit), parts in joint.items()]
        asked = FetchRequest(
            self._store.worker, limits, workload.count_free(), not self.brought_much
        )
        # An idle device asks the same again and again.
        if asked != self._asked:
            self._asked = asked
            self.keys, self._groups, self._commands = self._encode(asked)
        self._store.flush()
        self._asked_s = perf_counter()
        connection.send_packed_command((self._commands,))
        return True

    def _encode(self, asked: FetchRequest) -> tuple[tuple[str, ...], Sequence[int], bytes]:
        """The keys of the lists that are asked, the group of each, and the commands."""
        channel, key_of = self._channel, self._store.keys.queue
        groups = {part: at for at, (parts, _) in enumerate(asked.limits, 1) for part in parts}
        queues = dict.fromkeys(part.queue for part in groups)
        lists = [
            ([key_of(key) for key in fetched_lists(channel, queue, step)], group)
            for step, level in self._levels.items()
            for queue in queues
            if (group := groups.get(Part(queue, level)))
        ]
        names = (
            *(own[0] for own, _ in lists),
            *(key for own, _ in lists for key in own[1:]),
        )
        of_tenants = [group for own, group in lists for _ in own[1:]]
        fixed = self._own_keys(asked.holder)
        # By the keys of their first steps, by which others know the queues of what they hold.
        first = next(iter(self._levels))
        entry = [asked.free, [key_of(channel._q_for_pri(queue, first)) for queue in queues]]
        script = (
            *("EVALSHA", self._sha, len(fixed) + len(names)),
            *fixed,
            *names,
            *(asked.holder, MAX_FETCH_BYTES, json.dumps(entry) if asked.free else ""),
            *(len(asked.limits), *(limit for _, limit in asked.limits)),
            *(group for _, group in lists),
        )
        # Both in one round trip: a lonely job's device waits again before the job has begun.
        watching = (("CLIENT", "CACHING", "YES"), ("EXISTS", *names)) if asked.watches else ()
        return names, [*(group for _, group in lists), *of_tenants], packed(script, *watching)

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
        self._note_rich(asked, answer or ())
        self.is_entered = answer == [] and asked.free > 0
        self.brought_much = len(answer or ()) // 2 - 1 >= min(limit for _, limit in asked.limits)
        self.took_all = asked.watches and _is_watched(connection)
        if refusal is not None:
            if find_refusal(refusal) == "WRONGTYPE":
                self._log_wrong_types(asked.holder, refusal)
            raise refusal
        return answer

    def _note_rich(self, asked: FetchRequest, answer: Sequence[Any]) -> None:
        """Notes of each part that was asked whether there is probably more."""
        brought = Counter(map(self._groups.__getitem__, answer[2::2]))
        for group, (parts, limit) in enumerate(asked.limits, 1):
            if brought[group] >= limit:
                self.rich_parts.update(parts)
            else:
                self.rich_parts.difference_update(parts)

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


def _is_watched(connection: Any) -> bool:
    """Reads the answers to `CLIENT CACHING` and `EXISTS`; whether Redis tells of all changes."""
    connection.read_response()
    if connection.read_response():
        return False
    # A push right behind the answer may be in the parser already: then no event would come.
    return not connection.can_read(timeout=0)
