"""How a channel takes messages: asks Redis for many at once, and hands them to its consumers.

While there is nothing to take, nothing is popped: Redis tracks the queues' keys for the channel's
connection, and says when one of them changes.
"""

import contextlib
import logging
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol

import redis
from kombu.utils.encoding import bytes_to_str

from batchery.redis_scripts import packed, script_text
from batchery.transport.codec import read_json
from batchery.transport.dead_letters import dead_letter_malformed, dead_letter_unread
from batchery.transport.lease_store import LeaseStore
from batchery.transport.redis_schema import LUA
from batchery.transport.suspects import MAX_DELIVERY_DEATHS, delivery_of, suspect_of
from batchery.transport.workload import Capacity, Workload, entry_of

logger = logging.getLogger("batchery.transport")

#: What is raised by reading a message that is none: anybody can push anything into a list.
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)

#: A lease's token, the key of the queue, and the message as it was in the queue.
Taken = tuple[str, str, bytes]

#: Maximum number of bytes that one drain takes; Redis answers nobody else while it copies them.
MAX_DRAIN_BYTES = 16 * 2**20


class Fenced(redis.ConnectionError):
    """Another worker took this one's leases over; Celery starts its consumer anew."""


class Consumer(Protocol):
    """A leasing channel, as far as taking messages needs it. The names are kombu's and ours."""

    qos: Any
    connection: Any
    sep: str
    global_keyprefix: str
    priority_steps: Sequence[int]
    drain_messages: int
    queue_prefetch: Mapping[str, int]
    class_levels: Sequence[int]
    ordinary_queues: Collection[str]
    workload: Workload | None
    _queue_cycle: Any

    @property
    def active_queues(self) -> Collection[str]:
        """Names of the queues that are consumed."""

    def _q_for_pri(self, queue: str, pri: int) -> str:
        """Key of a queue's priority step, without the prefix."""

    def prepare_anew(self) -> None:
        """Compares leases with Redis before more messages are taken."""


class Part(NamedTuple):
    """The lists of one queue and priority class: a flood of one class keeps out no other."""

    queue: str
    #: First priority of the class.
    level: int


class Question(NamedTuple):
    """All that decides which words a drain has."""

    worker: str
    #: Maximum number of messages.
    free: int
    limits: tuple[tuple[Part, int], ...]
    #: What the worker could begin of all queues, and of each; empty where nobody tells of its jobs.
    capacity: Capacity
    capacities: Mapping[str, Capacity]
    leaves_rest: bool
    #: Whether Redis is asked to tell of changes, too.
    watches: bool
    #: Whether a single message is noted as about to run.
    notes: bool


class Spelled(NamedTuple):
    """A question in the words of Redis."""

    #: The keys that are asked, in order.
    keys: tuple[str, ...]
    #: How this worker is entered in Redis if there is nothing.
    entry: str
    commands: bytes


class Asked(NamedTuple):
    """A question as it was sent, and what must be known to understand its answer."""

    question: Question
    spelled: Spelled
    #: Names of the queues, in the order of their turns.
    queues: tuple[str, ...]
    #: Whether queues were left out that had their share.
    left_some_out: bool
    #: Whether queues, room and capacity decide all of it, as the worker holds nothing.
    is_idle: bool

    @property
    def wanted(self) -> int:
        """How many messages it wanted."""
        return min(self.question.free, sum(limit for _, limit in self.question.limits))


class Inbox:
    """The messages that a channel has leased: read, checked, and handed to its consumers."""

    def __init__(self, channel: Consumer, lease_store: LeaseStore) -> None:
        self._channel = channel
        self._lease_store = lease_store
        #: How many messages were handed over so far.
        self.count = 0

    def take_in(self, answer: list[Any], keys: tuple[str, ...]) -> None:
        """Hands over what a drain has brought.

        Args:
            answer: The script's answer, not empty.
            keys: The queues that the script was given.
        """
        suspects, first = int(answer[0]), int(answer[1])
        taken = [
            (str(first + at), keys[answer[2 + 2 * at]], answer[3 + 2 * at])
            for at in range(len(answer) // 2 - 1)
        ]
        self._channel._queue_cycle.rotate(self.queue_of(taken[0][1]))
        self._hand_over(taken, with_suspects=suspects > 0)

    def reconcile(self) -> None:
        """Hands over (again) what was leased for a channel that is gone, or with a lost answer.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        taken = self._lease_store.reconcile(self._channel.qos, active_tokens())
        self._hand_over(taken, with_suspects=True, again=True)

    def dead_letter(self, token: str, error: Exception) -> None:
        """Makes a dead letter of a message that cannot be understood.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        dead_letter_malformed(self._lease_store, token, error)

    def queue_of(self, key: str) -> str:
        """The queue of a key, which may be the key of one of its priorities."""
        return self._queue_and_step(key)[0]

    def part_of(self, key: str) -> Part:
        """The part of a key."""
        queue, step = self._queue_and_step(key)
        return part_of(self._channel, queue, step)

    def _queue_and_step(self, key: str) -> tuple[str, int]:
        name = key.removeprefix(self._channel.global_keyprefix)
        head, separator, step = name.rpartition(self._channel.sep)
        return (head, int(step)) if separator and step.isdigit() else (name, 0)

    def _hand_over(self, taken: list[Taken], *, with_suspects: bool, again: bool = False) -> None:
        for token, key, _ in taken:
            self._lease_store.take(token, self._channel.qos, key)
        waiting = [token for token, _, _ in taken]
        try:
            payloads = self._read(taken)
            if again:
                for _, _, payload in payloads:
                    _mark_redelivered(payload)
            suspects = self._recognise_suspects(payloads) if with_suspects else {}
            payloads = [each for each in payloads if self._lease_store.holds(each[0])]
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
                self.count += 1
                try:
                    transport._callbacks[queue](payload)
                except SystemExit as error:
                    if type(error) is SystemExit:  # Celery's own shutdown is a subclass.
                        self._lease_store.blame_delivery(suspect_of(payload))
                    raise
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
                payload = read_json(raw)
                properties = payload["properties"]
                # The token differs at each delivery; the tag stays, and tells a message sent twice.
                properties["publish_tag"] = properties.get("delivery_tag")
                properties["delivery_tag"] = token
            except MALFORMED as error:
                self.dead_letter(token, error)
            else:
                payloads.append((token, self.queue_of(key), payload))
        return payloads

    def _recognise_suspects(self, payloads: list[tuple[str, str, Any]]) -> Collection[str]:
        """Finds out which jobs were on a device, or were being read, when their worker died.

        Returns:
            Tokens of those that may be read. The others become dead letters.
        """
        ids = [suspect_of(payload) for _, _, payload in payloads]
        if not ids:
            return ()
        store, suspects = self._lease_store, set()
        fields = [*ids, *map(delivery_of, ids)]
        counts: Any = store.client.hmget(store.keys.suspects, fields)
        for suspect, deaths, read, (token, _, _) in zip(
            ids, counts, counts[len(ids) :], payloads, strict=False
        ):
            if deaths is None and read is None:
                continue
            store.suspect(token, suspect, None if deaths is None else int(deaths))
            if int(read or 0) >= MAX_DELIVERY_DEATHS:
                reason = f"its delivery ended {int(read)} workers, so it is not read again"
                dead_letter_unread(store, token, reason)
            else:
                suspects.add(token)
        return suspects


class Drain:
    """The commands by which a channel asks for messages; the channel says when they are sent."""

    def __init__(self, channel: Consumer, lease_store: LeaseStore, inbox: Inbox) -> None:
        self._channel = channel
        self._lease_store = lease_store
        self._inbox = inbox
        self._sha = ""
        #: The last questions, with notes and without: an idle worker asks both again and again.
        self._known: dict[bool, Asked] = {}
        self._asked: Asked | None = None
        #: The parts of each queue.
        self._parts: dict[str, Sequence[Part]] = {}
        #: Whether the last drain left out queues that had their share, or jobs for other workers.
        self.left_some_out = False
        #: The capacity with which this worker waits for work; none unless it waits.
        self.known_capacity = Capacity()
        #: Whether this worker is entered in Redis as waiting.
        self.is_entered = False
        #: Whether the last drain left its queues empty; then Redis tells when one of them changes.
        self.took_all = False
        #: Whether the last drain brought as much as it wanted; then there is probably more.
        self._brought_much = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that the last drain asked, in order."""
        return () if self._asked is None else self._asked.spelled.keys

    @property
    def watches(self) -> bool:
        """Whether the last drain also asked to be told of changes."""
        return self._asked is not None and self._asked.question.watches

    def prepare(self, connection: Any) -> None:
        """Prepares a fresh connection: Redis must tell it of changes, and know the script."""
        self.forget_entry()
        self._known.clear()
        self._lease_store.forget_drained()
        # Only keys asked for by CLIENT CACHING are tracked: the script reads heartbeats as well.
        connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
        connection.read_response()
        connection.send_command("SCRIPT", "LOAD", script_text(LUA, "drain"))
        self._sha = bytes_to_str(connection.read_response())

    def ask(self, connection: Any, *, may_note: bool) -> bool:
        """Sends the question, whose answer is the script's; False if no queue may give anything.

        Args:
            connection: Where it is sent.
            may_note: Whether Redis may note a single message as about to run, as no batch runs.
        """
        channel = self._channel
        free = min(channel.qos.free, channel.drain_messages)
        queues = tuple(channel._queue_cycle.consume(len(channel.active_queues)))
        watches = not self._brought_much
        asked = self._known.get(may_note)
        if asked is None or not self._is_as_then(asked, free, queues, watches):
            asked = self._anew(free, queues, watches, may_note)
            if asked is None:
                return False
            self._known[may_note] = asked
        self._lease_store.flush()
        self._asked, self.left_some_out = asked, asked.left_some_out
        connection.send_packed_command((asked.spelled.commands,))
        return True

    def _is_as_then(self, asked: Asked, free: int, queues: tuple[str, ...], watches: bool) -> bool:
        """Whether a question can be asked again as it was, without working it out."""
        question, workload = asked.question, self._channel.workload
        return (
            asked.is_idle
            and not self._lease_store.leases
            and (question.worker, question.free, asked.queues, question.watches)
            == (self._lease_store.worker, free, queues, watches)
            and (
                workload is None
                or (workload.capacity() == question.capacity and not workload.leaves_rest)
            )
        )

    def _anew(
        self, free: int, queues: tuple[str, ...], watches: bool, may_note: bool
    ) -> Asked | None:
        """Works a question out; None if no queue may give anything."""
        all_limits = self._limits(free, queues)
        limits = {part: limit for part, limit in all_limits.items() if limit > 0}
        if not limits:
            return None
        capacity, capacities, leaves_rest = self._workload()
        question = Question(
            self._lease_store.worker,
            free,
            tuple(limits.items()),
            capacity,
            capacities,
            leaves_rest,
            watches,
            notes=may_note and capacity.batch > 0,
        )
        known = self._known.get(may_note)
        if known is not None and known.question == question:
            spelled = known.spelled
        else:
            spelled = self._spell(question)
        return Asked(
            question,
            spelled,
            queues,
            left_some_out=len(limits) < len(all_limits),
            is_idle=not self._lease_store.leases and not leaves_rest,
        )

    def _workload(self) -> tuple[Capacity, Mapping[str, Capacity], bool]:
        """What this worker could begin, also by queue, and whether it leaves the rest to others."""
        workload = self._channel.workload
        if workload is None:
            return Capacity(), {}, False
        capacities = {queue: workload.capacity_for(queue) for queue in self._channel.active_queues}
        return workload.capacity(), capacities, workload.leaves_rest

    def _spell(self, question: Question) -> Spelled:
        channel, keys = self._channel, self._lease_store.keys
        numbers = {part: number for number, (part, _) in enumerate(question.limits, 1)}
        queues = list(dict.fromkeys(part.queue for part in numbers))
        lists = [
            (keys.queue(channel._q_for_pri(queue, step)), number)
            for step in channel.priority_steps
            for queue in queues
            if (number := numbers.get(part_of(channel, queue, step)))
        ]
        names = tuple(key for key, _ in lists)
        fixed = [keys.workers, self._lease_store.lease_key, keys.token, keys.suspects, keys.waiting]
        fixed.append(keys.running(question.worker))
        entry, arguments = self._arguments(question, queues)
        script = (
            *("EVALSHA", self._sha, len(fixed) + len(names)),
            *fixed,
            *names,
            *(question.worker, question.free, MAX_DRAIN_BYTES, entry, int(question.notes)),
            *arguments,
            *(number for _, number in lists),
        )
        # Both in one round trip: a lonely job's worker waits again before the job is on its device.
        commands = [script, *watching(names)] if question.watches else [script]
        return Spelled(names, entry, packed(*commands))

    def _arguments(self, question: Question, queues: Sequence[str]) -> tuple[str, list[Any]]:
        """The entry of this worker, and for the script what each part may give.

        Each part has two limits: the second one counts while others wait for its queue.
        """
        channel, capacities, limits = self._channel, question.capacities, dict(question.limits)
        first_step, name = channel.priority_steps[0], self._lease_store.keys.queue
        first_keys = {queue: name(channel._q_for_pri(queue, first_step)) for queue in queues}
        at_once, towards_others, entry = sum(limits.values()), limits, ""
        if capacities:
            entry = entry_of(
                question.capacity, {first_keys[queue]: capacities[queue] for queue in queues}
            )
            if question.leaves_rest:
                at_once = question.capacity.total
                towards_others = {part: capacities[part.queue].total for part in limits}
        parts = [
            (limit, towards_others[part], first_keys[part.queue]) for part, limit in limits.items()
        ]
        return entry, [len(parts), *chain.from_iterable(parts), at_once]

    def forget_entry(self) -> None:
        """Notes that this worker is not entered in Redis as waiting."""
        self.known_capacity, self.is_entered = Capacity(), False

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
        if answer == []:
            self.known_capacity = asked.question.capacity
            self.is_entered = bool(asked.spelled.entry)
        else:
            self.forget_entry()
        brought = len(answer or ()) // 2 - 1
        if brought == 1 and asked.question.notes:
            self._lease_store.drained(str(int(answer[1])))
        self._brought_much = brought >= asked.wanted
        self.took_all = self.watches and self._is_watched(connection)
        if refusal is not None:
            raise refusal
        return answer

    def nothing_came(self, connection: Any) -> bool:
        """Whether all queues are empty; from now on Redis tells when one of them changes."""
        connection.send_packed_command(connection.pack_commands(watching(self.keys)))
        return self._is_watched(connection)

    def others_wait(self, connection: Any) -> tuple[bool, bool]:
        """Asks whether other workers wait for work; from now on Redis tells when that changes.

        Returns:
            Whether others wait, and whether there is something in the queues that the last drain
            asked: a push that said so may have come in front of the answer.
        """
        waiting = ("HLEN", self._lease_store.keys.waiting)
        commands = [("CLIENT", "CACHING", "YES"), waiting]
        if self.keys:
            commands += watching(self.keys)
        while True:
            connection.send_packed_command(connection.pack_commands(commands))
            _, count, *filled = [connection.read_response() for _ in commands]
            if not connection.can_read(timeout=0):
                return int(count) > self.is_entered, bool(filled and filled[-1])
            # A push is behind the answers. It may be in the parser, where no event tells of it.
            connection.read_response(push_request=True)

    def _limits(self, free: int, queues: Sequence[str]) -> dict[Part, int]:
        """How many messages each part may give, in the order in which queues take turns."""
        channel, leases = self._channel, self._lease_store.leases
        parts = [part for queue in queues for part in self._parts_of(queue)]
        held: Counter[Part] = Counter()
        scheduled = 0
        if leases and (channel.class_levels or channel.queue_prefetch):
            for key, count in leases.by_key().items():
                held[self._inbox.part_of(key)] += count
            for token in scheduled_tokens():
                # Celery raises its own count for these, as they may wait for days.
                if lease := leases.get(token):
                    held[self._inbox.part_of(lease.key)] -= 1
                    scheduled += 1
        limits = dict.fromkeys(parts, free)
        for part in parts:
            if (maximum := self._maximum(part, scheduled)) is not None:
                limits[part] = min(free, maximum - held[part])
        if (workload := channel.workload) is not None:
            for part, known in limits.items():
                if (limit := workload.limit_for(part.queue, part.level)) is not None:
                    limits[part] = min(known, limit)
        return limits

    def _parts_of(self, queue: str) -> Sequence[Part]:
        if queue not in self._parts:
            steps = self._channel.priority_steps
            parts = dict.fromkeys(part_of(self._channel, queue, step) for step in steps)
            self._parts[queue] = tuple(parts)
        return self._parts[queue]

    def _maximum(self, part: Part, scheduled: int) -> int | None:
        """How many unsettled messages of a part this worker may hold; None for no limit."""
        channel = self._channel
        if part.queue in channel.queue_prefetch:
            return channel.queue_prefetch[part.queue]
        prefetch = int(getattr(channel.qos, "prefetch_count", 0) or 0)
        if not prefetch or not channel.class_levels or part.queue in channel.ordinary_queues:
            return None
        return -(-(prefetch - scheduled) // len(channel.class_levels))

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


def part_of(channel: Consumer, queue: str, step: int) -> Part:
    """The part of a queue that a priority step belongs to.

    Queues of ordinary tasks only, and channels that know of no classes, have one part per queue.
    """
    levels = channel.class_levels
    if not levels or queue in channel.ordinary_queues:
        return Part(queue, 0)
    return Part(queue, levels[max(0, bisect_right(levels, step) - 1)])


def leave_fenced(lease_store: LeaseStore) -> NoReturn:
    """Begins anew as another worker.

    Raises:
        Fenced: Always.
        redis.RedisError: Redis does not answer.
    """
    lost = lease_store.rejoin()
    logger.warning("this worker was silent for too long: its leases were handed on, %d jobs", lost)
    raise Fenced(f"{lost} jobs were handed on to other workers")


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


def _mark_redelivered(payload: Any) -> None:
    """Marks a message as kombu does: whoever has seen the job before looks twice."""
    for marked in (payload.get("headers"), payload["properties"].get("delivery_info")):
        if isinstance(marked, dict):
            marked["redelivered"] = True


def active_tokens() -> set[str]:
    """Tokens of the jobs that Celery's worker has accepted and not settled, if there is one."""
    return _tokens_of("active_requests")


def scheduled_tokens() -> set[str]:
    """Tokens of the jobs that Celery's worker holds until their time comes, if there is one."""
    return _tokens_of("scheduled_requests")


def _tokens_of(requests: str) -> set[str]:
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return set()
    return {str(request.message.delivery_tag) for request in list(getattr(state, requests))}
