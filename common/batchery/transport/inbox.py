"""The messages that a channel has leased: read, checked, and handed to its consumers.

Messages are read as kombu reads them, in a third of the time. Kombu's decoder searches each mapping
for values of types that JSON lacks, such as dates. Few messages have one. All others can be read by
a decoder that knows only JSON.

What a worker's pool tells of its jobs is a `Workload`. A worker that finds its queues empty, and
could begin a job at once, enters itself in Redis as waiting. While it is there, other workers give
back what they only hold.
"""

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import redis
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from pydantic_core import from_json

from batchery.transport.dead_letters import (
    check_size,
    dead_letter_unread,
)
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import split_list
from batchery.transport.suspects import (
    MAX_DELIVERY_DEATHS,
    build_delivery_field,
    build_expired_field,
    build_suspect_field,
    read_deaths,
)

_Message: Any = virtual.Message

JSON = "application/json"

#: The key by which kombu marks a value that JSON has no type for.
TYPE_MARK = b'"__type__"'


def writes_kombus_json() -> bool:
    """Whether messages in JSON are written by kombu's own encoder; an app may have another."""
    return bool(registry._encoders["json"].encoder is dumps)


def reads_kombus_json(accept: Collection[str] | None) -> bool:
    """Whether messages in JSON are accepted, and read by kombu's own decoder.

    Args:
        accept: Content types that the app accepts; None for all that kombu has enabled.
    """
    is_accepted = JSON not in registry._disabled_content_types if accept is None else JSON in accept
    return is_accepted and registry._decoders.get(JSON) is loads


def read_json(data: bytes) -> Any:
    """Reads what kombu's decoder reads.

    Raises:
        ValueError: The data is no JSON.
        RecursionError: The data is nested too deeply.
    """
    try:  # `suppress` would take as long as three readings.
        return _read_plain(data)
    except ValueError:
        return loads(data)


def _read_plain(data: bytes) -> Any:
    """Reads JSON with only JSON's own types; anything else is a ValueError.

    It also refuses some JSON that Python's decoder reads: half a surrogate pair, or very deep
    nesting.
    """
    if TYPE_MARK in data:
        raise ValueError("a value may be of another type")
    # The names of fields recur, so they are cached. Ids never do.
    return from_json(data, cache_strings="keys")


class Message(_Message):  # type: ignore[misc]
    """A message of a channel that leases."""

    def _decode(self) -> Any:
        is_json = self.content_type == JSON and self.accept and JSON in self.accept
        # An app may have registered another decoder.
        if is_json and isinstance(self.body, bytes) and registry._decoders.get(JSON) is loads:
            with contextlib.suppress(ValueError):
                return _read_plain(self.body)
        return super()._decode()


class Capacity(NamedTuple):
    """How many jobs a worker could begin at once, besides those that it holds."""

    batch: int = 0
    ordinary: int = 0


class Workload(Protocol):
    """The jobs of a worker, as its pool knows them; for the event loop's thread."""

    def capacity(self) -> Capacity:
        """How many jobs the worker could begin at once."""

    def find_kinds(self, queue: str) -> int:
        """Which jobs come by a queue: 1 for batch jobs, 2 for ordinary ones, 3 for both."""

    def limit_for(self, queue: str, level: int) -> int | None:
        """How many more jobs of a queue and priority class to take.

        Args:
            queue: Name of the queue.
            level: First priority of the class.

        Returns:
            None for no other limit than the prefetch.
        """

    def find_jobs(self, queue: str) -> Hashable:
        """Which jobs `limit_for` counts: one limit is for all queues by which the same ones come.

        Returns:
            None for a queue without a limit.
        """


def encode_entry(capacity: Capacity, kinds: Mapping[str, int]) -> str:
    """What Redis is told of a worker that waits; empty if it could begin nothing.

    Args:
        capacity: Its capacity.
        kinds: Which jobs come by each queue, by the queue's key: see `Workload.find_kinds`.
    """
    free = (capacity.batch > 0) + 2 * (capacity.ordinary > 0)
    wanted = {key: kinds & free for key, kinds in kinds.items() if kinds & free}
    return json.dumps([*capacity, wanted]) if wanted else ""


#: What is raised by reading a message that is none: anybody can push anything into a list.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

#: A lease's token, the key of the queue, and the message as it was in the queue.
Taken = tuple[str, str, bytes]


class Consumer(Protocol):
    """A leasing channel, as far as taking messages needs it. The names are kombu's and ours."""

    qos: Any
    connection: Any
    sep: str
    global_keyprefix: str
    priority_steps: Sequence[int]
    fetch_messages: int
    queue_prefetch: Mapping[str, int]
    class_levels: Sequence[int]
    workload: Workload | None
    _queue_cycle: Any

    @property
    def active_queues(self) -> Collection[str]:
        """Names of the queues that are consumed."""

    def _q_for_pri(self, queue: str, pri: int) -> str:
        """Key of a queue's priority step, without the prefix."""

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken."""


class Inbox:
    """The messages that a channel has leased: read, checked, and handed to its consumers."""

    def __init__(self, channel: Consumer, lease_store: LeaseStore) -> None:
        self._channel = channel
        self._lease_store = lease_store
        #: Queue and priority step of each key that was seen.
        self._places: dict[str, tuple[str, int]] = {}

    def take_in(self, answer: list[Any], keys: tuple[str, ...]) -> None:
        """Hands over what a fetch has brought.

        Args:
            answer: The script's answer, not empty.
            keys: The queues that the script was given.
        """
        suspects, first = int(answer[0]), int(answer[1])
        taken = [
            (str(first + at), keys[answer[2 + 2 * at]], answer[3 + 2 * at])
            for at in range(len(answer) // 2 - 1)
        ]
        self._channel._queue_cycle.rotate(self.find_place(taken[0][1])[0])
        self._hand_over(taken, with_suspects=suspects > 0)

    def count_scheduled(self) -> Counter[str]:
        """How many messages of each queue key are for jobs that wait for their time."""
        leases = self._lease_store.leases
        if leases.by_key(scheduled=True).total() != count_scheduled():
            # The time of some has come, of which Celery tells nobody.
            for token in _collect_tokens("reserved_requests"):
                leases.mark_scheduled(token, is_scheduled=False)
        return leases.by_key(scheduled=True)

    def dead_letter(self, token: str, error: Exception) -> None:
        """Makes a dead letter of a message that cannot be understood.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        reason = f"the message cannot be understood: {type(error).__name__}: {error}"
        dead_letter_unread(self._lease_store, token, reason)

    def find_place(self, key: str) -> tuple[str, int]:
        """The queue of a key, which may be that of any of its lists, and the priority step."""
        if key not in self._places:
            name = key.removeprefix(self._channel.global_keyprefix)
            self._places[key] = split_list(name, self._channel.sep)
        return self._places[key]

    def _hand_over(self, taken: list[Taken], *, with_suspects: bool, again: bool = False) -> None:
        for token, key, _ in taken:
            self._lease_store.leases.take(token, self._channel.qos, key)
        waiting = [token for token, _, _ in taken]
        try:
            payloads = self._read(taken)
            if again:
                for _, _, payload in payloads:
                    _mark_redelivered(payload)
            suspects: Collection[str] = ()
            if with_suspects:
                payloads, suspects = self._recognise_suspects(payloads)
            waiting = [token for token, _, _ in payloads]
            self._deliver(payloads, waiting, suspects)
        except (redis.RedisError, OSError):
            # The rest is handed over again with the next connection. If it went back to the queue,
            # nobody could tell that a job has been here.
            self._lease_store.leases.disown(waiting)
            self._channel.prepare_anew()
            raise
        except BaseException:
            # A consumer raised: the messages behind it are as good as never taken.
            with contextlib.suppress(redis.RedisError):
                left = [token for token in waiting if self._lease_store.holds(token)]
                self._lease_store.requeue(left, first=True)
            raise

    def _deliver(
        self, payloads: list[tuple[str, str, Any]], waiting: list[str], suspects: Collection[str]
    ) -> None:
        transport = self._channel.connection
        unwanted = []
        for token, queue, payload in payloads:
            waiting.pop(0)
            if token in suspects:
                self._lease_store.note_delivery(token)
            if queue in transport._callbacks:
                scheduled = count_scheduled()
                try:
                    transport._callbacks[queue](payload)
                except SystemExit as error:
                    if type(error) is SystemExit:  # Celery's own shutdown is a subclass.
                        self._lease_store.blame_delivery(build_suspect_field(payload))
                    raise
                if count_scheduled() > scheduled:
                    self._lease_store.leases.mark_scheduled(token, is_scheduled=True)
            else:
                # Its consumer was cancelled while the answer was under way.
                unwanted.append(token)
        if suspects:
            self._lease_store.forget_delivery()
        self._lease_store.requeue(unwanted, first=True)

    def _read(self, taken: list[Taken]) -> list[tuple[str, str, Any]]:
        payloads = []
        for token, key, raw in taken:
            try:
                check_size(raw)
                payload = read_json(raw)
                properties = payload["properties"]
                # The token differs at each delivery; the tag stays, and tells a message sent twice.
                properties["publish_tag"] = properties.get("delivery_tag")
                properties["delivery_tag"] = token
            except MALFORMED as error:
                self.dead_letter(token, error)
            else:
                payloads.append((token, self.find_place(key)[0], payload))
        return payloads

    def _recognise_suspects(
        self, payloads: list[tuple[str, str, Any]]
    ) -> tuple[list[tuple[str, str, Any]], Collection[str]]:
        """Finds out which jobs were on a device, or were being read, when their worker died.

        Returns:
            What may be read, and the suspects' tokens. The others become dead letters.
        """
        ids = [build_suspect_field(payload) for _, _, payload in payloads]
        if not ids:
            return [], ()
        store, suspects, unread = self._lease_store, set(), set()
        fields = [*ids, *map(build_delivery_field, ids), *map(build_expired_field, ids)]
        counts: Any = store.client.hmget(store.keys.suspects, fields)
        for suspect, deaths, read, expired, (token, _, _) in zip(
            ids, counts, counts[len(ids) :], counts[2 * len(ids) :], payloads, strict=False
        ):
            if deaths is None and read is None and expired is None:
                continue
            store.suspect(token, suspect, None if deaths is None else read_deaths(deaths))
            if expired is not None:
                store.expire(token, float(expired))
            if int(read or 0) >= MAX_DELIVERY_DEATHS:
                reason = f"its delivery ended {int(read)} workers, so it is not read again"
                dead_letter_unread(store, token, reason)
                unread.add(token)
            else:
                suspects.add(token)
        return [each for each in payloads if each[0] not in unread], suspects


def _mark_redelivered(payload: Any) -> None:
    """Marks a message as kombu does: whoever has seen the job before looks twice."""
    for marked in (payload.get("headers"), payload["properties"].get("delivery_info")):
        if isinstance(marked, dict):
            marked["redelivered"] = True


def count_scheduled() -> int:
    """How many jobs Celery's worker holds until their time comes, if there is one."""
    state = sys.modules.get("celery.worker.state")
    return 0 if state is None else len(state.scheduled_requests)


def _collect_tokens(requests: str) -> set[str]:
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return set()
    return {str(request.message.delivery_tag) for request in list(getattr(state, requests))}
