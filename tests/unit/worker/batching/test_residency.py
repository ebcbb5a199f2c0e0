"""Which models make room, and which jobs wait for a model: in virtual time."""

from math import inf

import pytest

from batchery_worker.batching.residency import (
    WORK_WHEN_BEHIND,
    DeviceModels,
    HeldModel,
    choose_victims,
)
from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

LIMITS = Limits(max_batch_size=4)

LOAD_S = 10.0


def held(name: str, idle_s: float, reload_s: float = 1.0, size: int = 10) -> HeldModel:
    return HeldModel(name, size, reload_s, idle_s)


@pytest.mark.parametrize(
    ("models", "wanted_bytes", "victims"),
    [
        ([], 1, None),
        ([held("a", 5), held("b", 9)], 0, []),
        ([held("a", 5), held("b", 9)], 10, ["b"]),
        ([held("a", 5), held("b", 9)], 11, ["b", "a"]),
        ([held("a", 5), held("b", 9)], 21, None),
        # It takes ten times as long to have it again.
        ([held("a", 5), held("b", 9, reload_s=10)], 10, ["a"]),
        # The one that is used least is too small, and then need not go.
        ([held("a", 9, size=1), held("b", 5, size=50)], 20, ["b"]),
        ([held("a", 9, size=5), held("b", 5, size=16)], 20, ["a", "b"]),
        # Jobs wait for it.
        ([held("a", 5), held("b", 9)._replace(is_wanted=True)], 10, ["a"]),
        # Nothing is divided by 0.
        ([held("a", 5, reload_s=0), held("b", 4, reload_s=0)], 10, ["a"]),
    ],
)
def test_who_makes_room(
    models: list[HeldModel], wanted_bytes: int, victims: list[str] | None
) -> None:
    assert choose_victims(models, wanted_bytes) == victims


class Worker:
    """A scheduler and its devices, each with the models that it has; some classes of jobs."""

    def __init__(self, *cold: dict[str, float]) -> None:
        self.scheduler: Scheduler[None] = Scheduler({"high": 50.0, "low": 25.0})
        fleet: list[DeviceModels] = []
        self.devices = [DeviceModels(fleet=fleet) for _ in cold]
        for device, states in zip(self.devices, cold, strict=True):
            device.report(states)

    def send(
        self, task: str, now_s: float, priority_class: str = "high", *, waited_s: float = 0.0
    ) -> None:
        lane = Lane(priority_class=priority_class)
        job = Job("id", BatchKey(task), LIMITS, 1, now_s, None, lane, waited_s=waited_s)
        self.scheduler.admit(job)

    def ask(self, now_s: float, device: int = 0, in_flight: int = 0) -> str | None:
        """The task of the batch that a device gets, which it has at once."""
        models = self.devices[device]
        batch: Batch[None] | None = self.scheduler.next_batch(
            in_flight, False, now_s, models=models
        )
        if batch is None:
            return None
        task = batch.jobs[0].key.task
        models.begin(task, now_s)
        self.scheduler.ended(batch, 1.0)
        return task


def test_jobs_whose_model_is_there_keep_their_turn_for_as_long_as_a_load() -> None:
    worker = Worker({"cold": LOAD_S})
    worker.send("cold", 0.0)
    for now_s in range(20):
        worker.send("warm", float(now_s))
    assert [worker.ask(now_s) for now_s in (0.0, 5.0, 9.9)] == ["warm"] * 3
    assert worker.devices[0].wake_s == LOAD_S
    # Then it is its turn, as it had less than its share.
    assert worker.ask(10.0) == "cold"
    assert worker.devices[0].wake_s == inf


def test_what_has_twice_the_share_waits_half_as_long_and_the_other_way_round() -> None:
    worker = Worker({"cold": LOAD_S})
    worker.send("cold", 0.0, "high")
    for now_s in range(20):
        worker.send("warm", float(now_s), "low")
    assert worker.ask(4.9) == "warm"
    assert worker.devices[0].wake_s == 5.0
    assert worker.ask(5.0) == "cold"
    worker = Worker({"cold": LOAD_S})
    worker.send("cold", 0.0, "low")
    for now_s in range(40):
        worker.send("warm", float(now_s), "high")
    assert worker.ask(19.9) == "warm"
    assert worker.ask(20.0) == "cold"


def test_a_class_waits_by_its_part_of_the_time_however_many_models_it_has() -> None:
    cold = {f"cold {number}": LOAD_S for number in range(20)}
    worker = Worker(cold)
    for name in cold:
        worker.send(name, 0.0, "high")
    for now_s in range(40):
        worker.send("warm", float(now_s), "low")
    # It has two thirds of the time.
    assert worker.ask(14.9) == "warm"
    assert worker.devices[0].wake_s == pytest.approx(15.0)
    assert worker.ask(15.1) == "cold 0"
    # One that has the whole share of its class for itself does not wait for that.
    worker = Worker({"cold": LOAD_S})
    worker.send("cold", 0.0, "low")
    for now_s in range(40):
        for number in range(20):
            worker.send(f"warm {number}", float(now_s), "high")
    assert str(worker.ask(0.9)).startswith("warm")
    assert worker.devices[0].wake_s == pytest.approx(1.0)


def run_pair(jobs_per_s: int) -> tuple[float, float]:
    """Two models, memory for one, batches of a second: the share of loads, and the last latency."""
    worker = Worker({"two": LOAD_S})
    now_s, loads_s, models = 0.0, 0.0, worker.devices[0]
    sent_s, oldest_s = 0.0, 0.0
    while now_s < 1000.0:
        while sent_s <= now_s:
            for _ in range(jobs_per_s):
                worker.send("one", sent_s)
                worker.send("two", sent_s)
            sent_s += 1.0
        cold = set(models.cold)
        oldest_s = now_s - min(job.arrived_s for job in worker.scheduler)
        task = worker.ask(now_s)
        assert task is not None
        if task in cold:
            other = "one" if task == "two" else "two"
            models.report({task: 0.0, other: LOAD_S})
            now_s += LOAD_S
            loads_s += LOAD_S
            models.end_load(task, now_s)
        now_s += 1.0
    return loads_s / now_s, oldest_s


def test_two_models_that_take_turns_do_not_spend_the_time_on_loads() -> None:
    # Half of the time for 2 of 4 jobs a second, in full batches: it keeps up.
    share, latency_s = run_pair(jobs_per_s=1)
    assert share < 0.5
    assert latency_s < 4 * LOAD_S
    # Four fifths of the time for 6 of 8: it cannot, and wastes no more than a fifth.
    share, _ = run_pair(jobs_per_s=3)
    assert share == pytest.approx(1 / (1 + WORK_WHEN_BEHIND), abs=0.03)


def test_cold_device_leaves_jobs_to_a_warm_one_for_as_long_as_a_load() -> None:
    worker = Worker({"embed": LOAD_S}, {"embed": 0.0})
    worker.send("embed", 0.0)
    assert worker.ask(0.0, device=0) is None
    assert worker.devices[0].wake_s == LOAD_S
    assert worker.ask(9.9, device=0) is None
    assert worker.ask(10.0, device=0) == "embed"


def test_cold_device_does_not_wait_for_one_that_is_gone() -> None:
    worker = Worker({"embed": LOAD_S}, {"embed": 0.0})
    worker.devices[1].forget()
    worker.send("embed", 0.0)
    assert worker.ask(0.0, device=0) == "embed"
    # It is being loaded there.
    worker.devices[1].report({"embed": LOAD_S})
    worker.send("embed", 0.0)
    assert worker.ask(0.0, device=1) is None


def test_what_a_job_has_waited_in_its_queue_counts() -> None:
    worker = Worker({"embed": LOAD_S}, {"embed": 0.0})
    worker.send("embed", 5.0, waited_s=4.0)
    assert worker.ask(10.9, device=0) is None
    assert worker.devices[0].wake_s == 11.0
    assert worker.ask(11.0, device=0) == "embed"


def test_no_more_idle_devices_come_for_the_same_jobs_than_have_their_model() -> None:
    worker = Worker({"embed": 0.0}, *[{"embed": LOAD_S}] * 5)
    for _ in range(40):
        worker.send("embed", 0.0)
    assert worker.ask(LOAD_S, device=1) == "embed"
    # One has it, and one will; a third is worth it only if they fall further behind.
    assert worker.ask(LOAD_S, device=2) is None
    assert worker.devices[2].wake_s == 2 * LOAD_S
    worker.devices[1].report({"embed": 0.0})
    assert [worker.ask(LOAD_S, device=number) for number in (2, 3, 4)] == ["embed", "embed", None]
    assert worker.ask(2 * LOAD_S, device=4) == "embed"


def test_busy_device_does_not_leave_because_its_next_jobs_are_not_here_yet() -> None:
    worker = Worker({"embed": LOAD_S}, {"embed": 0.0})
    for _ in range(4):
        worker.send("embed", 0.0)
    assert worker.ask(LOAD_S, in_flight=1) is None
    assert worker.ask(LOAD_S) == "embed"


def test_device_that_had_a_full_batch_waits_for_more_of_the_same() -> None:
    worker = Worker({"embed": LOAD_S, "warm": 0.0}, {"embed": 0.0})
    for _ in range(4):
        worker.send("warm", 20.0)
    assert worker.ask(20.0) == "warm"
    worker.send("embed", 5.0)
    assert worker.ask(21.0) is None
    assert worker.devices[0].wake_s == 30.0
    assert worker.ask(30.0) == "embed"
    # After one that was not full there is nothing more.
    worker = Worker({"embed": LOAD_S, "warm": 0.0}, {"embed": 0.0})
    worker.send("warm", 20.0)
    assert worker.ask(20.0) == "warm"
    worker.send("embed", 5.0)
    assert worker.ask(21.0) == "embed"


def run_two(*counts: int, classes: tuple[str, str] = ("high", "high")) -> list[str | None]:
    """What devices run, if so many have the first of two models, and others the second.

    Jobs of both have waited for long.
    """
    first, second = counts
    worker = Worker(
        *[{"one": 0.0, "two": LOAD_S}] * first,
        *[{"one": LOAD_S, "two": 0.0}] * second,
    )
    for name, priority_class in zip(("two", "one"), reversed(classes), strict=True):
        for _ in range(100):
            worker.send(name, 0.0, priority_class)
    # The second one is owed more.
    for device in range(first):
        assert worker.ask(0.0, device=device) == "one"
    return [worker.ask(100.0, device=device) for device in range(first)]


def test_busy_device_loads_only_what_fewer_devices_have() -> None:
    assert run_two(2, 1) == ["one", "one"]
    assert run_two(3, 2) == ["one", "one", "one"]
    # Then they have three and two.
    assert run_two(4, 1) == ["two", "one", "one", "one"]
    # Nobody else has it.
    assert run_two(2, 0)[0] == "two"


def test_busy_device_loads_what_has_fewer_devices_than_its_share() -> None:
    assert run_two(2, 2, classes=("low", "high")) == ["two", "one"]
    assert run_two(1, 2, classes=("low", "high")) == ["one"]
    assert run_two(4, 1, classes=("high", "low"))[0] == "one"


def test_device_gets_no_jobs_of_models_that_are_elsewhere() -> None:
    worker = Worker({}, {})
    worker.devices[0].elsewhere = frozenset({"embed"})
    worker.send("embed", 0.0)
    assert worker.ask(0.0, device=0) is None
    assert worker.ask(0.0, device=1) == "embed"
    suspect = Job("id", BatchKey("embed"), LIMITS, 1, 0.0, None)
    worker.scheduler.quarantine(suspect)
    assert worker.ask(0.0, device=0) is None
    assert worker.scheduler.next_batch(0, False, 0.0, models=worker.devices[1]) is not None


def test_nothing_urgent_is_loaded() -> None:
    worker = Worker({"live": LOAD_S})
    models = worker.devices[0]
    worker.send("bulk", 0.0, "low")
    running = worker.scheduler.next_batch(0, False, 0.0, models=models)
    assert running is not None
    worker.send("live", 0.0, "high")
    assert worker.scheduler.urgent_batch([running], 1.0, models=models) is None
    models.report({"live": 0.0})
    assert worker.scheduler.urgent_batch([running], 1.0, models=models) is not None


def test_what_a_device_says_meanwhile_ends_no_load() -> None:
    models = DeviceModels()
    models.report({"embed": LOAD_S})
    assert models.begin("embed", 5.0)
    assert not models.begin("embed", 5.0)
    # From a batch that has ended before.
    models.report({"embed": LOAD_S})
    assert not models.cold
    # It failed.
    models.end_load("embed", 7.0)
    models.report({"embed": LOAD_S})
    assert models.cold == {"embed": LOAD_S}
    assert models.loaded_s == 7.0
    assert models.begin("embed", 8.0)
    models.report({"embed": 0.0})
    assert not models.loading
    assert not models.cold
