"""When a worker tells that it waits, and which jobs go back to their queues when others do."""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery.worker import state as worker_state

from batchery.transport.inbox import Capacity
from batchery.transport.leases import HeldJob
from batchery_worker import late_binding
from batchery_worker.completion.ordinary import OrdinaryThreads
from batchery_worker.late_binding import (
    HELD_S,
    MAX_GIVING_PAUSE_S,
    Give,
    LateBinding,
    ProcessBacklog,
    QueueKinds,
)


class Clock:
    """A loop whose time stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.planned: list[tuple[float, Any]] = []

    def call_later(self, seconds: float, function: Any) -> Any:
        entry = (self.now_s + seconds, function)
        self.planned.append(entry)
        return SimpleNamespace(cancel=lambda: self.planned.remove(entry))

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        due = [each for each in self.planned if each[0] <= self.now_s + 1e-9]
        self.planned = [each for each in self.planned if each not in due]
        for _, function in due:
            function()


class Store:
    """A lease store that knows which jobs are suspects."""

    def __init__(self) -> None:
        self.suspects: set[str] = set()

        self.ended: set[str] = set()
        self.requeued: list[tuple[list[str], bool]] = []

    def deaths(self, token: str) -> int | None:
        return 1 if token in self.suspects else None

    def holds(self, token: str) -> bool:
        return token not in self.ended

    def requeue(self, tokens: list[str], *, first: bool) -> None:
        self.requeued.append((tokens, first))


class Channel:
    """A leasing channel, and other workers that can begin so many jobs."""

    def __init__(self) -> None:
        self.lease_store = Store()
        self.qos = SimpleNamespace(_delivered=set[str](), _dirty=set[str]())
        self.active_queues = {"models"}
        self.workload: Any = None
        self.ordinary_queues: list[str] = []
        self.queue_prefetch: dict[str, int] = {}
        self.room = 0
        self.asked = 0
        self.rooms_made = 0

    def others_wait(self) -> bool:
        self.asked += 1
        return self.room > 0

    def give_to_waiting(self, jobs: Sequence[HeldJob]) -> set[str]:
        given = {job.token for job in jobs[: self.room]}
        self.room -= len(given)
        return given

    def make_room(self) -> None:
        self.rooms_made += 1


class Request:
    """As much of Celery's request as goes back."""

    acknowledged = False

    def __init__(self, name: str, message: Any = None) -> None:
        self.id = self.name = name
        self.delivery_info = {"routing_key": "models"}
        self.message = message

    def on_success(self, _: Any) -> None:
        """Does nothing."""


class Backlog:
    """Jobs that wait, each with the time when it came."""

    def __init__(self, clock: Clock, channel: Channel) -> None:
        self.ask_for_more: Callable[[], None] = lambda: None
        self._clock, self._channel = clock, channel
        self.waiting: list[tuple[float, Any]] = []
        self.gathered: list[str] = []
        self.room = 0
        self.stranded: set[str] = set()
        self.has_suspects = False

    def is_stranded(self, task: str) -> bool:
        return task in self.stranded

    def add(self, *tokens: str) -> None:
        for token in tokens:
            message = SimpleNamespace(channel=self._channel, delivery_tag=token)
            request = Request(token, message)
            self.waiting.append((self._clock.now_s, request))

    @property
    def tokens(self) -> list[str]:
        return [request.id for _, request in self.waiting]

    def free(self) -> int:
        return self.room

    def gather(self, take_in: Callable[[], None]) -> None:
        take_in()
        self.gathered = self.tokens

    held = 5

    def limit(self, sizes: Mapping[str, int], level: int, others: int = 0) -> int:
        return sum(sizes.values()) + others

    def oldest_s(self) -> float | None:
        return self.waiting[0][0] if self.waiting else None

    def offer_stranded(self, give: Give) -> int:
        return self.offer(self._clock.now_s, give) if self.stranded else 0

    def offer(self, before_s: float, give: Give) -> int:
        old = [request for since_s, request in self.waiting if since_s <= before_s]
        given = [request.id for request in give(old)]
        self.waiting = [each for each in self.waiting if each[1].id not in given]
        return len(given)


class House:
    """A worker with one backlog of batch jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.channel = Clock(), Channel()
        monkeypatch.setattr(late_binding, "monotonic", lambda: self.clock.now_s)
        self.backlog = Backlog(self.clock, self.channel)
        backlog: Any = self.backlog
        kinds = {
            "models": QueueKinds({"embed": 32}, ordinary=False),
            "mixed": QueueKinds({"embed": 32}, ordinary=True),
        }
        self.binding = LateBinding(lambda: backlog, None, kinds, 4)
        self.binding.bind(self.channel, self.clock)

    def take(self, *tokens: str) -> None:
        """A fetch brings jobs, which no device can begin."""
        self.binding.hand_over(lambda: self.backlog.add(*tokens))


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def test_jobs_that_were_held_for_a_while_go_oldest_first_as_far_as_others_have_room(
    house: House,
) -> None:
    house.take("9", "10", "11")
    house.channel.room = 2
    house.clock.pass_time(HELD_S / 2)
    assert house.backlog.tokens == ["9", "10", "11"]
    house.clock.pass_time(HELD_S / 2)
    assert house.backlog.tokens == ["11"]


def test_while_nobody_waits_it_looks_less_and_less_often(house: House) -> None:
    house.take("1")
    house.clock.pass_time(HELD_S)
    asked = house.channel.asked
    for _ in range(100):
        house.clock.pass_time(HELD_S)
    assert 9 <= house.channel.asked - asked <= 15
    house.channel.room = 1
    for _ in range(int(MAX_GIVING_PAUSE_S / HELD_S)):
        house.clock.pass_time(HELD_S)
    assert house.backlog.tokens == []


def test_pause_between_two_looks_doubles_while_nobody_waits(house: House) -> None:
    house.take("1")
    pauses_s = []
    for _ in range(6):
        ((due_s, _),) = house.clock.planned
        pauses_s.append(round(due_s - house.clock.now_s, 3))
        house.clock.pass_time(due_s - house.clock.now_s)
    assert pauses_s == [
        HELD_S,
        *(HELD_S * 2**n for n in (1, 2, 3)),
        MAX_GIVING_PAUSE_S,
        MAX_GIVING_PAUSE_S,
    ]


def test_a_worker_that_holds_nothing_does_not_look(house: House) -> None:
    house.clock.pass_time(HELD_S)
    assert not house.clock.planned
    house.take("1")
    assert len(house.clock.planned) == 1
    house.backlog.waiting.clear()
    house.clock.pass_time(HELD_S)
    assert not house.clock.planned
    assert house.channel.asked == 0


def test_after_a_reconnect_it_looks_no_more_often(house: House) -> None:
    house.take("1")
    for _ in range(3):
        house.binding.bind(house.channel, house.clock)
    assert len(house.clock.planned) == 1
    house.clock.pass_time(HELD_S)
    assert (house.channel.asked, len(house.clock.planned)) == (1, 1)


def test_jobs_that_were_too_young_go_later(house: House) -> None:
    house.take("1")
    house.clock.pass_time(HELD_S / 2)
    house.take("2")
    house.channel.room = 9
    house.clock.pass_time(HELD_S / 2)
    assert house.backlog.tokens == ["2"]
    house.clock.pass_time(HELD_S)
    assert house.backlog.tokens == []


def test_suspects_and_jobs_without_a_lease_stay(house: House) -> None:
    house.take("1", "2", "not-leased")
    house.channel.lease_store.suspects.add("1")
    house.channel.room = 9
    house.clock.pass_time(HELD_S)
    assert house.backlog.tokens == ["1", "not-leased"]


def test_jobs_whose_devices_are_drained_go_back_though_nobody_waits(house: House) -> None:
    house.take("1", "2", "3", "4", "not-leased")
    # A suspect is no exception, but for one that was acknowledged when it began.
    house.channel.lease_store.suspects.update("34")
    house.channel.lease_store.ended.add("1")
    (_, mixed), (_, request) = house.backlog.waiting[1:3]
    mixed.delivery_info = {"routing_key": "mixed"}
    house.backlog.stranded = {"embed"}
    house.binding.plan_look()
    house.clock.pass_time(HELD_S)
    assert house.channel.lease_store.requeued == [(["3", "4"], True)]
    assert house.backlog.tokens == ["1", "2", "not-leased"]
    assert (request.acknowledged, mixed.acknowledged) == (True, False)


def test_while_suspects_wait_it_looks_whether_their_devices_are_drained(house: House) -> None:
    house.clock.pass_time(HELD_S)
    house.backlog.ask_for_more()
    assert not house.clock.planned
    house.backlog.has_suspects = True
    house.backlog.ask_for_more()
    house.clock.pass_time(HELD_S)
    assert len(house.clock.planned) == 1
    house.backlog.has_suspects = False
    house.clock.pass_time(HELD_S)
    assert not house.clock.planned


def test_queues_are_served_unless_all_their_jobs_are_for_drained_devices(house: House) -> None:
    queues = ("models", "mixed", "unknown")
    assert [house.binding.serves(queue) for queue in queues] == [True, True, True]
    house.backlog.stranded = {"embed"}
    assert [house.binding.serves(queue) for queue in queues] == [False, True, True]


def test_a_job_that_went_back_is_settled_for_celery(house: House) -> None:
    house.take("1")
    (_, request) = house.backlog.waiting[0]
    house.channel.room = 1
    house.clock.pass_time(HELD_S)
    assert request.acknowledged


def test_the_channel_is_asked_for_more_when_a_device_will_soon_be_free(house: House) -> None:
    house.backlog.ask_for_more()
    assert house.channel.rooms_made == 1


def test_what_comes_by_a_queue_decides_how_much_is_taken(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.backlog.room = 32
    assert house.binding.capacity() == Capacity(32, 0)
    assert house.binding.limit_for("models", 0) == 32
    # As many ordinary jobs as Celery would hold may be among them. It counts what is not settled.
    monkeypatch.setattr(worker_state, "reserved_requests", set(range(99)))
    house.channel.qos._delivered.update("abcdefghi")
    house.channel.qos._dirty.add("a")
    monkeypatch.setattr(worker_state, "scheduled_requests", {"with an ETA"})
    assert house.binding.limit_for("mixed", 0) == 32 + 4 - (7 - 5)
    # Anything may come by a queue that no task names.
    assert house.binding.limit_for("unnamed", 0) == 32 + 4 - (7 - 5)
    assert house.binding.find_jobs("unnamed") == house.binding.find_jobs("mixed")
    assert house.binding.find_jobs("models") == (frozenset({"embed"}), False)
    assert [house.binding.find_kinds(each) for each in ("models", "mixed", "unnamed")] == [1, 3, 3]


def take(*names: str) -> Give:
    """Gives the jobs of these names to others."""

    def give(requests: Sequence[Any]) -> Collection[Any]:
        return [each for each in requests if each.name in names]

    return give


def test_jobs_that_wait_for_a_process_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: deque[Any] = deque()
    semaphore = SimpleNamespace(value=0, _waiting=waiting)
    worker = SimpleNamespace(semaphore=semaphore)
    worker.process_task = lambda each: waiting.append((None, (each,), {}))
    backlog = ProcessBacklog(worker)
    assert backlog.oldest_s() is None
    for second, name in enumerate("abcd"):
        monkeypatch.setattr(late_binding, "monotonic", lambda second=second: float(second))
        worker.process_task(Request(name))
    assert backlog.oldest_s() == 0.0
    assert backlog.offer(2.0, take("a", "c", "d")) == 2
    assert [entry[1][0].name for entry in waiting] == ["b", "d"]


class BusyThread:
    """A thread of ordinary jobs; the first job waits until the others are to run."""

    def __init__(self) -> None:
        self.pool = OrdinaryThreads(1, app=None)
        self.pool._run = lambda target, *args: target(*args)  # type: ignore[method-assign]
        self.pool.on_start()
        self._gate, self._ran = threading.Event(), list[str]()

    def add(self, name: str) -> None:
        self.pool.on_apply(self._work, (name,), {}, Request(name).on_success, lambda *_: None)

    def end(self) -> list[str]:
        """Lets all of them run; returns which ran, in order."""
        self._gate.set()
        self.pool.executor.shutdown(wait=True)
        return self._ran

    def _work(self, name: str) -> None:
        if name == "first":
            self._gate.wait(10)
        self._ran.append(name)


def test_jobs_that_wait_for_a_thread_are_run_in_order_unless_they_went() -> None:
    thread = BusyThread()
    for name in ("first", "a", "b", "c"):
        thread.add(name)
    pool = thread.pool
    assert pool.free() == 0
    since_s = pool.oldest_s()
    assert since_s is not None
    assert pool.offer(since_s + 60, take("first", "b")) == 1
    assert thread.end() == ["first", "a", "c"]
    assert pool.free() == 1


def test_jobs_of_which_nobody_knows_whether_they_went_begin_nowhere_here() -> None:
    thread = BusyThread()

    def lose(_: Sequence[Any]) -> Collection[Any]:
        raise redis.ConnectionError("the answer was lost")

    for name in ("first", "a", "b"):
        thread.add(name)
    now_s = time.monotonic()
    thread.add("young")
    with pytest.raises(redis.ConnectionError):
        thread.pool.offer(now_s, lose)
    assert thread.end() == ["first", "young"]


def test_messages_of_a_fetch_begin_together(house: House) -> None:
    house.take("1", "2")
    assert house.backlog.gathered == ["1", "2"]


def test_ordinary_queues_follow_the_pool_on_each_channel(house: House) -> None:
    house.channel.ordinary_queues = ["mail"]
    house.channel.queue_prefetch = {"mail": 4, "embed": 64}
    house.binding.grow(8)
    assert house.channel.queue_prefetch == {"mail": 12, "embed": 64}
    again = Channel()
    again.ordinary_queues, again.queue_prefetch = ["mail"], {"mail": 4}
    house.binding.bind(again, house.clock)
    house.binding.grow(-4)
    assert again.queue_prefetch == {"mail": 8}


def test_messages_are_taken_in_where_no_device_is_left() -> None:
    taken: list[int] = []
    binding = LateBinding(lambda: None, None, {}, 4)
    binding.bind(Channel(), Clock())
    binding.hand_over(lambda: taken.append(1))
    assert taken == [1]
