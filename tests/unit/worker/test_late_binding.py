"""When a worker tells that it waits, and which jobs go back to their queues when others do."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.transport.workload import Capacity, HeldJob, encode_entry
from batchery_worker import late_binding
from batchery_worker.completion.ordinary import OrdinaryThreads
from batchery_worker.late_binding import (
    HELD_S,
    IDLE_S,
    BatchBacklog,
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

    def call_later(self, seconds: float, function: Any) -> None:
        self.planned.append((self.now_s + seconds, function))

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

    def deaths(self, token: str) -> int | None:
        return 1 if token in self.suspects else None


class Channel:
    """A leasing channel, and other workers that can begin so many jobs."""

    def __init__(self) -> None:
        self.lease_store = Store()
        self.active_queues = {"models"}
        self.workload: Any = None
        self.is_capacity_stale = False
        self.is_busy = False
        self.room = 0
        self.asked = self.fetched = 0

    def others_wait(self) -> bool | None:
        self.asked += 1
        return None if self.is_busy else self.room > 0

    def give_to_waiting(self, jobs: Sequence[HeldJob]) -> set[str]:
        given = {job.token for job in jobs[: self.room]}
        self.room -= len(given)
        return given

    def ask_again(self) -> None:
        self.fetched += 1


class Request:
    """As much of Celery's request as goes back."""

    acknowledged = False

    def __init__(self, name: str, message: Any = None) -> None:
        self.id = self.name = name
        self.message = message

    def on_success(self, _: Any) -> None:
        """Does nothing."""


class Backlog:
    """Jobs that wait, each with the time when it came."""

    def __init__(self, clock: Clock, channel: Channel) -> None:
        self._clock, self._channel = clock, channel
        self.waiting: list[tuple[float, Any]] = []
        self.gathered: list[str] = []
        self.room = 0

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

    def limit(self, sizes: Mapping[str, int], level: int) -> int | None:
        return sum(sizes.values())

    def oldest_s(self) -> float | None:
        return self.waiting[0][0] if self.waiting else None

    def offer(self, before_s: float, give: Give) -> int:
        old = [request for since_s, request in self.waiting if since_s <= before_s]
        given = [request.id for request in give(old)]
        younger = len(self.waiting) - len(old)
        self.waiting = [each for each in self.waiting if each[1].id not in given]
        return younger


class House:
    """A worker with one backlog of batch jobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.channel = Clock(), Channel()
        monkeypatch.setattr(late_binding, "monotonic", lambda: self.clock.now_s)
        self.backlog = Backlog(self.clock, self.channel)
        backlog: BatchBacklog = self.backlog
        kinds = {
            "models": QueueKinds({"embed": 32}, ordinary=False),
            "mixed": QueueKinds({"embed": 32}, ordinary=True),
        }
        self.binding = LateBinding(lambda: (backlog, None), lambda: True, kinds)
        self.binding.bind(self.channel, self.clock)

    def turn(self, seconds: float = 0.0) -> None:
        self.clock.pass_time(seconds)
        self.binding.on_turn()


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def test_jobs_that_were_held_for_a_while_go_oldest_first_as_far_as_others_have_room(
    house: House,
) -> None:
    house.backlog.add("9", "10", "11")
    house.channel.room = 2
    house.turn()
    house.turn(HELD_S / 2)
    assert house.backlog.tokens == ["9", "10", "11"]
    house.turn(HELD_S / 2)
    assert house.backlog.tokens == ["11"]


def test_a_worker_that_begins_to_wait_gets_jobs_at_once(house: House) -> None:
    house.backlog.add("1")
    house.turn()
    house.turn(HELD_S)
    asked = house.channel.asked
    for _ in range(10):
        house.turn(HELD_S)
    # Nobody waited then, and Redis will tell.
    assert house.channel.asked == asked
    house.channel.room = 1
    house.binding.on_waiting()
    assert house.backlog.tokens == []


def test_a_push_that_an_answer_hid_is_made_up_for(house: House) -> None:
    house.backlog.add("1")
    house.turn()
    house.turn(HELD_S)
    house.channel.room = 1
    house.turn(HELD_S)
    assert house.backlog.tokens == ["1"]
    house.binding.on_answer()
    house.turn()
    house.turn(HELD_S)
    assert house.backlog.tokens == []


def test_jobs_that_were_too_young_go_later(house: House) -> None:
    house.backlog.add("1")
    house.clock.pass_time(HELD_S)
    house.backlog.add("2")
    house.channel.room = 9
    house.binding.on_waiting()
    assert house.backlog.tokens == ["2"]
    house.turn(HELD_S)
    assert house.backlog.tokens == []


def test_a_question_that_cannot_be_asked_now_is_asked_in_the_next_turn(house: House) -> None:
    house.backlog.add("1")
    house.clock.pass_time(HELD_S)
    house.channel.room, house.channel.is_busy = 1, True
    house.binding.on_waiting()
    assert house.backlog.tokens == ["1"]
    house.channel.is_busy = False
    house.turn()
    assert house.backlog.tokens == []


def test_suspects_and_jobs_without_a_lease_stay(house: House) -> None:
    house.backlog.add("1", "2", "not-leased")
    house.channel.lease_store.suspects.add("1")
    house.clock.pass_time(HELD_S)
    house.channel.room = 9
    house.binding.on_waiting()
    assert house.backlog.tokens == ["1", "not-leased"]


def test_a_job_that_went_back_is_settled_for_celery(house: House) -> None:
    house.backlog.add("1")
    (_, request) = house.backlog.waiting[0]
    house.clock.pass_time(HELD_S)
    house.channel.room = 1
    house.binding.on_waiting()
    assert request.acknowledged


def test_redis_is_told_of_a_capacity_that_lasts(house: House) -> None:
    house.channel.is_capacity_stale = True
    house.turn()
    house.turn()
    assert house.channel.fetched == 0
    house.clock.pass_time(IDLE_S)
    assert house.channel.fetched == 1
    house.turn()
    house.channel.is_capacity_stale = False
    house.clock.pass_time(IDLE_S)
    assert house.channel.fetched == 1


def test_capacity_counts_the_kinds_that_come_by_a_queue(house: House) -> None:
    house.backlog.room = 32
    assert house.binding.capacity() == Capacity(32, 0)
    assert house.binding.capacity_for("models") == Capacity(32, 0)
    # Nothing limits a queue by which ordinary jobs come, too, or by which anything may come.
    assert house.binding.limit_for("models", 0) == 32
    assert house.binding.limit_for("mixed", 0) is None
    assert house.binding.limit_for("unnamed", 0) is None


def test_entry_names_only_queues_for_which_there_is_room() -> None:
    queues = {"a": Capacity(8, 0), "b": Capacity(8, 2), "c": Capacity(), "d": Capacity(0, 2)}
    assert encode_entry(Capacity(8, 2), queues) == '[8, 2, {"a": 1, "b": 3, "d": 2}]'
    assert encode_entry(Capacity(), {"a": Capacity()}) == ""


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
    assert backlog.offer(2.0, take("a", "c", "d")) == 1
    assert [entry[1][0].name for entry in waiting] == ["b", "d"]


def test_jobs_that_wait_for_a_thread_are_run_in_order_unless_they_went() -> None:
    pool = OrdinaryThreads(1, app=None)
    pool._run = lambda target, *args: target(*args)  # type: ignore[method-assign]
    pool.on_start()
    gate, ran = threading.Event(), []

    def work(name: str) -> None:
        if name == "first":
            gate.wait(10)
        ran.append(name)

    for name in ("first", "a", "b", "c"):
        pool.on_apply(work, (name,), {}, Request(name).on_success, lambda *_: None)
    assert pool.free() == 0
    since_s = pool.oldest_s()
    assert since_s is not None
    assert pool.offer(since_s + 60, take("first", "b")) == 0
    gate.set()
    pool.executor.shutdown(wait=True)
    assert ran == ["first", "a", "c"]
    assert pool.free() == 1


def test_messages_of_a_fetch_begin_together(house: House) -> None:
    house.binding.gather(lambda: house.backlog.add("1", "2"))
    assert house.backlog.gathered == ["1", "2"]


def test_messages_are_taken_in_where_no_device_is_left() -> None:
    taken: list[int] = []
    LateBinding(lambda: (None, None), lambda: True, {}).gather(lambda: taken.append(1))
    assert taken == [1]
