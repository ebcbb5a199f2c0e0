"""How much a worker wants of its queues, and which jobs others may have, by what devices do."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from batchery import Settings
from batchery.transport.redis_schema import Keys
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.dispatch.demand import BatchDemand
from batchery_worker.in_flight import DispatchedBatch, InFlight, TaskCall
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits
from batchery_worker.request import LeaseHandle
from support.fake_devices import Clock

SHARES = {"high": 3.0, "normal": 2.0, "low": 1.0}

#: Batch size of the task of all jobs here.
SIZE = 4


class Device:
    """A device, as demand sees it."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self.in_turn: list[DispatchedBatch] = []
        self.is_ready = True
        self.takes_urgent = self.is_drained = False
        self.setup = SimpleNamespace(task="", slots=0, elsewhere=frozenset[str]())
        self.free_slots = 0

    @property
    def is_idle(self) -> bool:
        return self.is_ready and not self.in_turn

    def serves(self, task: str) -> bool:
        return task not in self.setup.elsewhere


class Request:
    """A request of Celery's, which can go to another worker."""

    def __init__(self, lease: LeaseHandle | None = None) -> None:
        self.lease = lease


class Scene:
    """The demand of a worker, with a real scheduler and real times of batches."""

    supervisor: Any

    def __init__(self, clock: Clock, *devices: Device, prefetch_batches: int = 2) -> None:
        self.clock = clock
        self.scheduler: Scheduler[TaskCall] = Scheduler(SHARES)
        self.devices = devices or (Device(),)
        self.supervisor = SimpleNamespace(devices=self.devices, is_reserved=False)
        self.in_flight = InFlight()
        settings = Settings(prefetch_batches=prefetch_batches)
        gather: Callable[[Any], None] = lambda take_in: take_in()  # noqa: E731
        self.demand = BatchDemand(
            self.scheduler, self.supervisor, self.in_flight, settings, SIZE, gather
        )

    def job(self, name: str = "high", request: Any = None, **message: Any) -> Job[TaskCall]:
        nothing: Any = None
        call = TaskCall(nothing, ("task", "id", message), nothing, nothing, nothing, request)
        limits, key = Limits(SIZE), BatchKey("task")
        return Job("id", key, limits, 1, self.clock.now_s, call, Lane(name))

    def admit(self, count: int, name: str = "high") -> list[Any]:
        """Takes jobs in; returns their requests."""
        requests: list[Any] = [Request() for _ in range(count)]
        for request in requests:
            self.scheduler.admit(self.job(name, request))
        return requests

    def run(self, device: Device, items: int = SIZE, name: str = "high") -> DispatchedBatch:
        """Gives a device a batch, which begins if it is the first one."""
        self.admit(items, name)
        batch = self.scheduler.next_batch(0, alone=False, now_s=self.clock.now_s)
        assert batch is not None
        dispatched = DispatchedBatch(batch, self.clock.now_s)
        if not device.in_turn:
            dispatched.began_s = self.clock.now_s
        device.in_turn.append(dispatched)
        return dispatched

    def learn(self, run_s: float, items: int = SIZE, device: str = "cpu") -> None:
        """Three batches have taken so long."""
        for _ in range(3):
            self.demand.times.ran(device, "task", items, run_s, 0.0)

    def limit(self, level: int = 0, others: int = 0) -> int:
        return self.demand.limit({"task": SIZE}, level, others)


Make = Callable[..., Scene]


@pytest.fixture
def make(clock: Clock) -> Make:
    return lambda *devices, **options: Scene(clock, *devices, **options)


# How much to take


def test_a_batch_is_wanted_for_each_idle_device_less_what_waits(make: Make) -> None:
    scene = make(Device("cuda:0"), Device("cuda:1"))
    assert (scene.demand.free(), scene.limit()) == (2 * SIZE, 2 * SIZE)
    scene.admit(3)
    assert (scene.demand.free(), scene.limit()) == (2 * SIZE - 3, 2 * SIZE - 3)
    scene.admit(6)
    assert (scene.demand.free(), scene.limit()) == (0, 0)


def test_device_that_starts_wants_nothing(make: Make) -> None:
    device = Device()
    device.is_ready = False
    scene = make(device)
    assert (scene.demand.free(), scene.limit()) == (0, 0)


def test_jobs_are_offered_whose_devices_are_all_drained(make: Make) -> None:
    scene = make(Device("cuda:0"), Device("cuda:1"))
    requests = scene.admit(3)
    scene.devices[0].is_drained = True
    assert (scene.demand.offer_stranded(list), scene.limit()) == (0, SIZE - 3)
    scene.devices[1].is_drained = True
    assert scene.limit() == 0
    assert scene.demand.offer_stranded(lambda given: given[:2]) == 2
    assert [job.payload.request for job in scene.scheduler.held()] == requests[2:]


def test_jobs_are_stranded_where_those_devices_are_drained_that_serve_their_task(
    make: Make,
) -> None:
    scene = make(Device("cuda:0"), Device("cuda:1"))
    scene.devices[1].setup.elsewhere = frozenset({"task"})
    scene.admit(3)
    scene.devices[0].is_drained = True
    assert [scene.demand.is_stranded(task) for task in ("task", "other")] == [True, False]
    assert scene.demand.offer_stranded(list) == 3


def test_suspects_keep_only_their_devices_from_other_jobs_and_go_back_from_drained_ones(
    make: Make,
) -> None:
    scene = make(Device("cuda:0"), Device("cuda:1"))
    first, second = scene.devices
    first.setup.elsewhere, second.setup.elsewhere = frozenset({"other"}), frozenset({"task"})
    suspect, recovered = (scene.job(request=Request()) for _ in range(2))
    scene.in_flight._calls["id"] = suspect.payload
    scene.scheduler.quarantine(suspect)
    limit = partial(scene.demand.limit, {"task": SIZE, "other": SIZE}, 0)
    assert (scene.demand.free(), limit()) == (SIZE - 1, SIZE)
    # The worker must run nothing beside one that may kill it.
    scene.scheduler.quarantine_recovered(recovered)
    assert (scene.demand.free(), limit()) == (0, 0)
    first.is_drained = True
    assert scene.demand.offer_stranded(list) == 2
    assert (len(scene.in_flight), scene.demand.has_suspects) == (0, False)
    assert (scene.demand.free(), limit()) == (SIZE, SIZE)


def test_jobs_of_other_classes_do_not_count_against_a_class(make: Make) -> None:
    scene = make()
    scene.admit(3, "low")
    assert [scene.limit(level) for level in (0, 9)] == [SIZE, 1]


def test_worker_that_ends_wants_nothing_and_gives_nothing(make: Make) -> None:
    scene = make()
    scene.admit(1)
    scene.run(scene.devices[0])
    scene.clock.now_s += 100
    scene.demand.is_over = True
    assert (scene.demand.free(), scene.limit(others=5), scene.demand.oldest_s()) == (0, 0, None)


def test_what_is_held_counts_with_what_runs(make: Make) -> None:
    scene = make()
    scene.admit(3)
    scene.in_flight._calls.update(a=scene.job().payload, b=scene.job().payload)
    assert scene.demand.held == 5


@pytest.mark.parametrize("waits", [True, False])
def test_while_a_suspect_waits_or_runs_only_jobs_of_others_are_wanted(
    make: Make, waits: bool
) -> None:
    scene = make()
    if waits:
        scene.scheduler.quarantine(scene.job())
    else:
        scene.supervisor.is_reserved = True
    scene.demand.times.ran("cpu", "task", 1, 0.01, 0.0)
    assert (scene.demand.free(), scene.limit(), scene.limit(others=3)) == (0, 0, 3)
    # Jobs wait although a device is idle, and could begin elsewhere.
    scene.admit(1)
    assert scene.demand.oldest_s() == scene.clock.now_s


def test_batch_of_which_nothing_is_known_counts_as_short_until_it_takes_longer(
    make: Make,
) -> None:
    scene = make()
    scene.run(scene.devices[0])
    assert scene.limit() == SIZE
    # Batches of another size were short: some more are wanted.
    scene.learn(0.01, items=1)
    assert scene.limit() == 3 * SIZE
    scene.clock.now_s += 1.0
    assert scene.limit() == 0


def test_behind_short_batches_some_more_are_wanted_but_only_one_for_an_idle_device(
    make: Make,
) -> None:
    devices = Device("cuda:0"), Device("cuda:1")
    scene = make(*devices, prefetch_batches=2)
    scene.learn(0.01, device="cuda:0")
    assert scene.limit() == 2 * SIZE
    scene.run(devices[0])
    assert scene.limit() == (3 + 1) * SIZE
    # Two are there, which are short: one ends soon.
    scene.run(devices[0])
    assert scene.limit() == (3 + 1) * SIZE


def test_behind_a_long_batch_one_is_wanted_when_it_is_almost_done(make: Make) -> None:
    scene = make()
    scene.learn(2.0)
    scene.run(scene.devices[0])
    wanted = []
    for _ in range(4):
        wanted.append(scene.limit())
        scene.clock.now_s += 0.5
    assert wanted == [0, 0, 0, SIZE]
    # The next one is there, and long as well.
    scene.run(scene.devices[0])
    assert scene.limit() == 0


def test_time_counts_from_when_a_batch_began_and_else_from_when_it_was_sent(make: Make) -> None:
    scene = make()
    scene.learn(2.0)
    dispatched = scene.run(scene.devices[0])
    scene.clock.now_s += 1.6
    assert scene.limit() == SIZE
    # An urgent batch came in between.
    dispatched.began_s = scene.clock.now_s - 1.0
    assert scene.limit() == 0
    dispatched.began_s = None
    assert scene.limit() == SIZE


def test_jobs_that_may_go_between_the_passes_are_wanted(make: Make) -> None:
    scene = make()
    scene.learn(2.0)
    scene.run(scene.devices[0], name="low")
    assert [scene.limit(level) for level in (0, 9)] == [0, 0]
    scene.devices[0].takes_urgent = True
    assert [scene.limit(level) for level in (0, 9)] == [SIZE, 0]


# What others may have


def test_nothing_waits_for_a_device_while_one_is_idle(make: Make) -> None:
    devices = Device("cuda:0"), Device("cuda:1")
    scene = make(*devices)
    scene.run(devices[0])
    scene.admit(1)
    assert scene.demand.oldest_s() is None
    scene.run(devices[1], items=3)
    scene.admit(1)
    scene.clock.now_s += 1.0
    assert scene.demand.oldest_s() == scene.clock.now_s - 1.0


def give_all(offered: list[Any]) -> Callable[[Sequence[Any]], Collection[Any]]:
    def give(requests: Sequence[Any]) -> Collection[Any]:
        offered.extend(requests)
        return requests

    return give


def test_only_jobs_that_are_old_enough_and_have_a_request_are_offered_oldest_first(
    make: Make,
) -> None:
    scene, offered = make(), list[Any]()
    scene.learn(2.0)
    scene.run(scene.devices[0])
    before_s = scene.clock.now_s
    # The scheduler keeps the classes apart.
    low, high = scene.admit(1, "low"), scene.admit(2)
    scene.scheduler.admit(scene.job())
    scene.clock.now_s += 0.5
    young = scene.admit(1)
    assert scene.demand.offer(before_s, give_all(offered)) == 3
    assert set(offered) == {*low, *high}
    assert len(scene.scheduler) == 2
    assert scene.demand.offer(scene.clock.now_s, give_all(offered)) == 1
    assert offered[3:] == young


def test_jobs_that_nobody_took_stay(make: Make) -> None:
    scene = make()
    scene.learn(2.0)
    scene.run(scene.devices[0])
    requests = scene.admit(3)
    assert scene.demand.offer(scene.clock.now_s, lambda each: each[1:]) == 2
    assert [job.payload.request for job in scene.scheduler] == requests[:1]


def test_devices_that_are_almost_done_keep_their_next_batch_the_oldest_jobs(make: Make) -> None:
    devices = Device("cuda:0"), Device("cuda:1")
    scene, offered = make(*devices), list[Any]()
    for device in devices:
        scene.learn(2.0, device=device.name)
    scene.run(devices[0])
    scene.clock.now_s += 1.6
    scene.run(devices[1])
    requests = scene.admit(SIZE + 2)
    scene.demand.offer(scene.clock.now_s, give_all(offered))
    assert offered == requests[SIZE:]


# What waits


def test_waiting_jobs_are_counted_by_queue_with_the_age_of_the_oldest(make: Make) -> None:
    scene = make()

    class Store:
        keys = Keys("shop-")

        def get_key(self, token: str) -> str | None:
            return {"1": "shop-embed\x06\x163", "2": "shop-embed"}.get(token)

    store: Any = Store()
    for token in ("1", "2", "gone"):
        lease = LeaseHandle(store, token)
        message = {"delivery_info": {"routing_key": "elsewhere"}}
        scene.scheduler.admit(scene.job("high", Request(lease), **message))
        scene.clock.now_s += 1.0
    scene.scheduler.admit(scene.job("high", None))
    waiting = scene.demand.waiting_by_queue(scene.clock.now_s)
    assert waiting == {
        "embed": {"jobs": 2, "oldest_s": 3.0},
        "elsewhere": {"jobs": 1, "oldest_s": 1.0},
        "": {"jobs": 1, "oldest_s": 0.0},
    }


def test_age_counts_from_when_a_job_was_sent(make: Make) -> None:
    scene = make()
    scene.scheduler.admit(replace(scene.job(), waited_s=9.0))
    scene.clock.now_s += 1.0
    (queue,) = scene.demand.waiting_by_queue(scene.clock.now_s).values()
    assert queue["oldest_s"] == 10.0


def test_nothing_is_asked_for_until_a_channel_is_there(make: Make) -> None:
    make().demand.ask_for_more()


def test_suspect_batch_is_never_interrupted(make: Make) -> None:
    scene = make()
    suspect = Batch((scene.job("low"),), alone=True)
    scene.devices[0].in_turn = [DispatchedBatch(suspect, scene.clock.now_s)]
    scene.devices[0].takes_urgent = True
    scene.clock.now_s += 1.0
    assert scene.limit() == 0


# Devices that do not serve all tasks


def test_only_devices_that_serve_a_task_want_its_jobs_and_keep_them(make: Make) -> None:
    one, other = Device("cpu:0"), Device("cpu:1")
    other.setup.elsewhere = frozenset({"task"})
    scene = make(one, other)
    assert scene.limit() == SIZE
    assert scene.demand.limit({"task": SIZE, "more": SIZE}, 0) == 2 * SIZE + SIZE
    scene.learn(10.0, device="cpu:0")
    scene.run(one)
    assert scene.limit() == 0
    scene.admit(1)
    # The idle device has no use for it.
    assert scene.demand.oldest_s() == scene.clock.now_s
    assert scene.demand.offer(scene.clock.now_s, list) == 1
    other.setup.elsewhere = frozenset()
    scene.admit(1)
    assert scene.demand.oldest_s() is None
