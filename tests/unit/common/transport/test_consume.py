"""What a channel asks Redis for: which queues, how much of each, and what it does with the answer.

Redis is a connection that keeps the commands; the test says what it answers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import pytest
import redis
from celery.worker import state as worker_state

from batchery.redis_scripts import RedisScripts
from batchery.transport import consume
from batchery.transport.consume import (
    MAX_FETCH_BYTES,
    Fenced,
    Fetcher,
    Part,
    find_part,
    leave_fenced,
    refusals_as_lost_connection,
)
from batchery.transport.inbox import Capacity, Inbox
from batchery.transport.leases import Leases
from batchery.transport.redis_schema import LUA, Keys

KEYS = Keys("shop-")

#: Keys of a fetch before those of the queues.
FIXED = 7


class Connection:
    """A connection to Redis."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.answers: list[Any] = []
        self.has_more = False

    def send_command(self, *command: Any) -> None:
        self.sent.append(command)

    def send_packed_command(self, commands: Sequence[Any]) -> None:
        self.sent += commands[0]

    def pack_commands(self, commands: Any) -> Sequence[Any]:
        return (commands,)

    def read_response(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def can_read(self, timeout: float) -> bool:
        return self.has_more


class Cycle:
    """The turns of the queues."""

    def __init__(self, *queues: str) -> None:
        self.queues = list(queues)

    def consume(self, count: int) -> list[str]:
        return self.queues[:count]

    def rotate(self, last_used: str) -> None:
        self.queues.remove(last_used)
        self.queues.append(last_used)


class Free(NamedTuple):
    """The room of a prefetch."""

    free: int
    prefetch_count: int


class Workload:
    """The jobs of a worker."""

    def __init__(self, batch: int = 0, ordinary: int = 0) -> None:
        self.room = Capacity(batch, ordinary)
        self.limits: dict[tuple[str, int], int | None] = {}
        self.jobs: dict[str, str] = {}

    def capacity(self) -> Capacity:
        return self.room

    def find_kinds(self, queue: str) -> int:
        return 3

    def serves(self, queue: str) -> bool:
        return True

    def limit_for(self, queue: str, level: int) -> int | None:
        return self.limits.get((queue, level))

    def find_jobs(self, queue: str) -> str | None:
        return self.jobs.get(queue)


class Channel:
    """As much of a leasing channel as fetching needs."""

    sep = "\x06"
    global_keyprefix = "shop-"
    priority_steps = (0, 3, 6, 9)
    fetch_messages = 1000

    def __init__(self, *queues: str) -> None:
        self.active_queues = set(queues)
        self._queue_cycle = Cycle(*queues)
        self.qos = Free(100, 0)
        self.queue_prefetch: dict[str, int] = {}
        self.class_levels: tuple[int, ...] = ()
        self.ordinary_queues: tuple[str, ...] = ()
        self.workload: Any = None

    def _q_for_pri(self, queue: str, pri: int) -> str:
        return f"{queue}{self.sep}{pri}" if pri else queue


class Store:
    """The leases of a worker."""

    keys = KEYS
    worker = "w1"
    lease_key = KEYS.lease("w1")

    def __init__(self) -> None:
        self.leases = Leases()
        self.noted: list[str] = []
        self.sorted: list[bytes] = []
        self.calls: list[str] = []
        self.scripts = RedisScripts(cast(Any, None), LUA)
        self.running_batches = self

    def flush(self) -> None:
        self.calls.append("flush")

    def forget_fetched(self) -> None:
        self.calls.append("forget_fetched")

    def fetched(self, token: str) -> None:
        self.noted.append(token)

    def sort_tenants(self, key: bytes) -> None:
        self.sorted.append(key)

    def rejoin(self) -> int:
        self.calls.append("rejoin")
        return 3

    def hold(self, *keys: str) -> None:
        """Takes leases on messages from the queues of these keys."""
        owner: Any = None
        for token, key in enumerate(keys, len(self.leases) + 1):
            self.leases.take(str(token), owner, f"shop-{key}")


class Question(NamedTuple):
    """A fetch, read back from its command."""

    lists: list[str]
    free: int
    entry: str
    notes: int
    limits: list[int]
    #: The number of its part, for each list.
    parts: list[int]
    watches: bool


class Scene:
    """A fetcher between a channel and a Redis."""

    def __init__(self, *queues: str) -> None:
        self.channel, self.store, self.connection = Channel(*queues), Store(), Connection()
        channel: Any = self.channel
        store: Any = self.store
        self.fetcher = Fetcher(channel, store, Inbox(channel, store))

    def asks(self, *, may_note: bool = False) -> bool:
        return self.fetcher.ask(self.connection, may_note=may_note)

    def question(self, *, may_note: bool = False) -> Question:
        """Asks, and reads what was asked."""
        self.connection.sent.clear()
        assert self.asks(may_note=may_note)
        name, _, count, *rest = self.connection.sent[0]
        assert name == "EVALSHA"
        keys, args = rest[:count], rest[count:]
        assert keys[:FIXED] == [
            *(KEYS.workers, self.store.lease_key, KEYS.token, KEYS.suspects, KEYS.waiting),
            *(KEYS.running("w1"), KEYS.tenants),
        ]
        worker, free, max_bytes, entry, notes, parts = args[:6]
        assert (worker, max_bytes) == ("w1", MAX_FETCH_BYTES)
        lists = keys[FIXED:]
        watches = self.connection.sent[1:] == [("CLIENT", "CACHING", "YES"), ("EXISTS", *lists)]
        assert watches == (len(self.connection.sent) > 1)
        limits, numbers = args[6 : 6 + parts], args[6 + parts :]
        assert len(numbers) == len(lists)
        return Question(lists, free, entry, notes, limits, numbers, watches)

    def answer(self, *answers: Any) -> Any:
        """Lets Redis answer the last question: the script, then whether lists exist."""
        self.connection.answers += answers
        return self.fetcher.read(self.connection)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    monkeypatch.setattr(consume, "packed", lambda *commands: commands)
    for name in ("active_requests", "scheduled_requests"):
        monkeypatch.setattr(worker_state, name, set())
    return Scene


#: An answer with a message: how many were suspects, first token, number of its list, message.
ONE = [0, 7, 0, b"{}"]
TWO = [0, 7, 0, b"{}", 0, b"{}"]

Make = Callable[..., Scene]


# What is asked


def test_queues_without_classes_are_asked_as_one_part_each_urgent_steps_first(make: Make) -> None:
    asked = make("a", "b").question()
    assert asked.lists == [
        *("shop-a", "shop-b", "shop-a\x063", "shop-b\x063"),
        *("shop-a\x066", "shop-b\x066", "shop-a\x069", "shop-b\x069"),
    ]
    assert asked.parts == [1, 2] * 4
    assert (asked.free, asked.limits, asked.watches) == (100, [100, 100], True)


def test_queues_by_which_the_same_jobs_come_have_one_limit(make: Make) -> None:
    scene = make("a", "b", "c", "own")
    scene.channel.class_levels, scene.channel.queue_prefetch = (0, 6), {"own": 40}
    scene.channel.workload = workload = Workload(batch=32)
    workload.limits = {(queue, level): 32 for queue in ("a", "b", "c", "own") for level in (0, 6)}
    workload.jobs = {"a": "embed", "b": "embed", "c": "rerank", "own": "embed"}
    asked = scene.question()
    # By queue for each of the steps 0, 3, 6 and 9.
    assert asked.parts == [1, 1, 3, 5] * 2 + [2, 2, 4, 6] * 2
    assert asked.limits == [32] * 6


def test_each_class_of_a_queue_is_a_part_of_its_own(make: Make) -> None:
    scene = make("a", "plain")
    scene.channel.class_levels, scene.channel.ordinary_queues = (0, 3, 6), ("plain",)
    asked = scene.question()
    assert asked.parts == [1, 4, 2, 4, 3, 4, 3, 4]
    channel: Any = scene.channel
    assert [find_part(channel, "a", step).level for step in (0, 2, 3, 5, 6, 9)] == [
        *(0, 0, 3, 3, 6, 6)
    ]
    assert find_part(channel, "plain", 9) == Part("plain", 0)
    # Priorities below the first class are of that class.
    scene.channel.class_levels = (2, 6)
    assert find_part(channel, "a", 0) == Part("a", 2)


def test_fetch_is_no_larger_than_the_room_or_the_option(make: Make) -> None:
    scene = make("a")
    scene.channel.fetch_messages = 10
    assert scene.question().free == 10
    scene.channel.qos = Free(9, 0)
    assert scene.question().free == 9


def test_queue_with_its_own_prefetch_gives_what_it_has_left_of_it(make: Make) -> None:
    scene = make("a", "b")
    scene.channel.queue_prefetch = {"a": 3}
    scene.store.hold("a", "a\x066", "b")
    assert scene.question().limits == [1, 100]
    assert not scene.fetcher.left_some_out
    # What has its share is not asked, until something of it is settled.
    scene.store.hold("a")
    asked = scene.question()
    assert (asked.limits, asked.lists[0]) == ([100], "shop-b")
    assert scene.fetcher.left_some_out


def test_nothing_is_asked_where_no_queue_may_give_anything(make: Make) -> None:
    scene = make("a")
    scene.channel.queue_prefetch = {"a": 1}
    scene.store.hold("a")
    assert not scene.asks()
    assert scene.connection.sent == []


def test_classes_share_the_prefetch_so_that_none_keeps_out_another(make: Make) -> None:
    scene = make("a")
    scene.channel.class_levels, scene.channel.qos = (0, 3, 6), Free(10, 10)
    scene.store.hold("a", "a", "a", "a\x066")
    # Each class has a third of ten, rounded up; it holds three of the first, one of the last.
    assert scene.question().limits == [1, 4, 3]
    # A queue of ordinary tasks has all of it.
    scene = make("plain")
    scene.channel.class_levels, scene.channel.qos = (0, 3, 6), Free(10, 10)
    scene.channel.ordinary_queues = ("plain",)
    scene.store.hold("plain", "plain")
    assert scene.question().limits == [10]


def test_jobs_that_wait_for_their_time_take_no_part_of_the_prefetch(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There may be tens of thousands, so nobody may look at each of them.
    monkeypatch.setattr(worker_state, "scheduled_requests", range(2))
    scene = make("a")
    # Celery has raised the prefetch by the two that it holds.
    scene.channel.class_levels, scene.channel.qos = (0, 5), Free(12, 12)
    scene.store.hold("a", "a", "a")
    for token in ("1", "2"):
        scene.store.leases.mark_scheduled(token, is_scheduled=True)
    assert scene.question().limits == [5 - 1, 5]


def test_pool_limits_what_its_tasks_are_taken_for(make: Make) -> None:
    scene = make("a", "b")
    scene.channel.workload = workload = Workload()
    workload.limits = {("a", 0): 7, ("b", 0): 500}
    assert scene.question().limits == [7, 100]
    workload.limits = {("a", 0): 0}
    workload.room = Capacity(1, 0)
    assert scene.question().lists[0] == "shop-b"


def test_single_message_is_noted_only_if_a_device_could_begin_it_and_none_runs(make: Make) -> None:
    scene = make("a")
    assert not scene.question(may_note=True).notes
    scene.channel.workload = Workload(batch=0, ordinary=2)
    assert not scene.question(may_note=True).notes
    scene.channel.workload = Workload(batch=1)
    assert scene.question(may_note=True).notes
    assert not scene.question(may_note=False).notes


def test_worker_that_could_begin_something_enters_itself_for_each_queue(make: Make) -> None:
    scene = make("a", "b")
    assert scene.question().entry == ""
    scene.channel.workload = Workload(batch=2)
    assert scene.question().entry == '[2, 0, {"shop-a": 1, "shop-b": 1}]'


def test_idle_worker_asks_the_same_without_working_it_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make("a")
    scene.channel.workload = workload = Workload(batch=4)
    first, worked_out = scene.question(), list[Any]()
    limits = Fetcher._limits

    def work_out(*arguments: Any) -> Any:
        worked_out.append(arguments[1:])
        return limits(*arguments)

    monkeypatch.setattr(Fetcher, "_limits", work_out)
    assert scene.question() == first
    assert worked_out == []
    # Whatever it depends on may change.
    workload.room = Capacity(3, 0)
    assert scene.question() != first
    scene.channel.qos = Free(99, 0)
    scene.question()
    scene.store.worker = "w1"
    scene.store.hold("a")
    scene.question()
    scene.question()
    assert len(worked_out) == 4
    # With leases it was worked out; the first question without them is, too.
    scene.store.leases.clear()
    scene.question()
    scene.question()
    assert len(worked_out) == 5


def test_question_of_another_turn_of_the_queues_is_worked_out(make: Make) -> None:
    scene = make("a", "b")
    assert scene.question().lists[:2] == ["shop-a", "shop-b"]
    scene.channel._queue_cycle.rotate("a")
    assert scene.question().lists[:2] == ["shop-b", "shop-a"]


def test_acknowledgements_go_before_the_question(make: Make) -> None:
    scene = make("a")
    scene.asks()
    assert scene.store.calls == ["flush"]


# What is answered


def test_after_an_empty_answer_the_worker_waits_for_changes(make: Make) -> None:
    scene = make("a")
    scene.channel.workload = Workload(batch=4)
    scene.asks()
    assert scene.answer([], b"OK", 0) == []
    assert scene.fetcher.took_all
    assert scene.fetcher.is_entered
    assert scene.fetcher.known_capacity == Capacity(4, 0)
    # A message ends the wait.
    scene.asks()
    assert scene.answer(list(ONE), b"OK", 0) == ONE
    assert not scene.fetcher.is_entered
    assert scene.fetcher.known_capacity == Capacity()


def test_worker_that_could_begin_nothing_is_not_entered(make: Make) -> None:
    scene = make("a")
    scene.asks()
    scene.answer([], b"OK", 0)
    assert not scene.fetcher.is_entered


@pytest.mark.parametrize(("exists", "has_more"), [(1, False), (0, True)])
def test_what_is_left_in_a_queue_is_asked_for_at_once(
    make: Make, exists: int, has_more: bool
) -> None:
    scene = make("a")
    scene.connection.has_more = has_more
    scene.asks()
    scene.answer(list(ONE), b"OK", exists)
    assert not scene.fetcher.took_all


def test_queue_that_was_added_meanwhile_is_asked_before_the_worker_waits(make: Make) -> None:
    scene = make("a")
    scene.asks()
    scene.channel.active_queues = {"a", "new"}
    scene.answer([], b"OK", 0)
    assert not scene.fetcher.took_all


def test_fetch_that_brought_all_it_wanted_is_followed_by_one_that_watches_nothing(
    make: Make,
) -> None:
    scene = make("a")
    scene.channel.qos = Free(2, 0)
    assert scene.question().watches
    scene.answer(list(TWO), b"OK", 1)
    assert not scene.question().watches
    assert not scene.fetcher.watches
    assert scene.answer(list(ONE)) == ONE
    assert not scene.fetcher.took_all
    # One of two: then there is probably nothing more.
    assert scene.question().watches
    assert scene.fetcher.watches


def test_fetch_wants_no_more_than_its_parts_may_give(make: Make) -> None:
    scene = make("a", "b")
    scene.channel.queue_prefetch = {"a": 1, "b": 1}
    scene.asks()
    scene.answer(list(TWO), b"OK", 1)
    assert not scene.question().watches


@pytest.mark.parametrize(
    ("answer", "notes", "noted"),
    [(ONE, True, ["7"]), (ONE, False, []), (TWO, True, []), ([], True, [])],
)
def test_message_that_came_alone_is_known_to_be_noted(
    make: Make, answer: list[Any], notes: bool, noted: list[str]
) -> None:
    scene = make("a")
    scene.channel.workload = Workload(batch=1)
    scene.asks(may_note=notes)
    scene.answer(list(answer), b"OK", 0)
    assert scene.store.noted == noted


def test_list_that_is_not_sorted_by_tenant_is_sorted_before_the_next_fetch(make: Make) -> None:
    scene = make("a")
    scene.asks()
    assert scene.answer([*ONE, b"shop-a"], b"OK", 1) == ONE
    assert scene.store.sorted == []
    scene.asks()
    assert scene.store.sorted == [b"shop-a"]
    scene.answer([], b"OK", 0)
    scene.asks()
    assert scene.store.sorted == [b"shop-a"]


def test_refusal_is_raised_when_all_answers_were_read(make: Make) -> None:
    scene = make("a")
    scene.asks()
    with pytest.raises(redis.ResponseError, match="READONLY"):
        scene.answer(redis.ResponseError("READONLY"), b"OK", 0)
    assert scene.connection.answers == []
    assert not scene.fetcher.is_entered


def test_fetches_are_counted_with_their_time(make: Make) -> None:
    scene = make("a")
    for _ in range(2):
        scene.asks()
        scene.answer([], b"OK", 0)
    took = scene.store.scripts.times["fetch"]
    assert (took.calls, 0 < took.seconds < 60) == (2, True)


def test_fenced_worker_gets_no_answer(make: Make) -> None:
    scene = make("a")
    scene.asks()
    assert scene.answer(None, b"OK", 1) is None


def test_sweep_asks_whether_something_came_and_to_be_told_from_now_on(make: Make) -> None:
    scene = make("a")
    scene.asks()
    lists = scene.fetcher.keys
    scene.answer([], b"OK", 0)
    for exists in (0, 1):
        scene.connection.sent.clear()
        scene.connection.answers = [b"OK", exists]
        assert scene.fetcher.nothing_came(scene.connection) == (not exists)
        assert scene.connection.sent == [("CLIENT", "CACHING", "YES"), ("EXISTS", *lists)]


def test_before_the_first_question_nothing_was_asked(make: Make) -> None:
    scene = make("a")
    assert scene.fetcher.keys == ()
    assert not scene.fetcher.watches
    assert not scene.fetcher.is_entered


def test_fresh_connection_is_told_to_track_what_is_asked_for_and_forgets_what_was_known(
    make: Make,
) -> None:
    scene = make("a")
    scene.channel.workload = Workload(batch=1)
    scene.asks()
    scene.answer([], b"OK", 0)
    scene.connection.sent.clear()
    scene.connection.answers = [b"OK", b"digest"]
    scene.fetcher.prepare(scene.connection)
    assert scene.connection.sent[0] == ("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")
    assert scene.connection.sent[1][:2] == ("SCRIPT", "LOAD")
    assert not scene.fetcher.is_entered
    assert scene.store.calls[-1] == "forget_fetched"
    scene.connection.sent.clear()
    scene.asks()
    (_, digest, *_), *_ = scene.connection.sent
    assert digest == "digest"


# Errors


def test_what_redis_refuses_for_a_while_counts_as_a_lost_connection() -> None:
    with (
        pytest.raises(redis.ConnectionError, match="refuses to serve"),
        refusals_as_lost_connection(),
    ):
        raise redis.ReadOnlyError("READONLY")
    # A script that is not there is loaded, and is no reason to reconnect.
    with pytest.raises(redis.exceptions.NoScriptError), refusals_as_lost_connection():
        raise redis.exceptions.NoScriptError("NOSCRIPT")


def test_fenced_worker_begins_anew_and_says_how_many_jobs_it_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store: Any = Store()
    with pytest.raises(Fenced, match="3 jobs were handed on"):
        leave_fenced(store)
    assert store.calls == ["rejoin"]
    assert "silent for too long" in caplog.text
