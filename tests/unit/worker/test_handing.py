"""Which device gets the messages of Celery's consumer, and what becomes of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from batchery.transport.suspects import Deaths
from batchery_worker.device_pool.process import State
from batchery_worker.device_pool.watched import WatchedBatch
from batchery_worker.handing import HandedJob, HandedJobs
from batchery_worker.ipc.messages import Fate, Forget, Handed, Ready, Running, Settled

TASK = SimpleNamespace(name="work", slots=None)


class Message:
    """A message that notes what the broker is told of it."""

    body, content_type, content_encoding = b"[]", "application/json", "utf-8"

    def __init__(self, task_id: str, *, redelivered: bool = False) -> None:
        self.headers = {"task": "work", "id": task_id, "retries": 0}
        self.properties: dict[str, Any] = {}
        self.delivery_info = {"redelivered": redelivered}
        self.told: list[str] = []

    def ack_log_error(self, *_: Any) -> None:
        self.told.append(Fate.ACKNOWLEDGED)

    def reject_log_error(self, _log: Any, _errors: Any, requeue: bool) -> None:
        self.told.append(Fate.REQUEUED if requeue else Fate.REJECTED)


class Fleet:
    """Two devices, and what they were told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.devices = [self._make("cuda:0"), self._make("cuda:1")]
        self.jobs = HandedJobs(self)  # type: ignore[arg-type]
        self.consumer = SimpleNamespace(
            hub=None,
            connection_errors=(OSError,),
            _restore_prefetch_count_after_connection_restart=lambda _: None,
        )

    def _make(self, name: str) -> Any:
        setup = SimpleNamespace(serves=lambda _: True)

        def tell(message: Any) -> None:
            self.sent.append((name, message))

        return SimpleNamespace(name=name, setup=setup, state=State.READY, tell=tell)

    def call(self, function: Any) -> None:
        function()

    def hand(self, task_id: str, *, redelivered: bool = False) -> Message:
        message = Message(task_id, redelivered=redelivered)
        self.jobs.hand_over(HandedJob(message, message.headers, TASK, self.consumer))
        return message

    def handed(self) -> list[tuple[str, Handed]]:
        """What was handed over since the last look."""
        found = [(name, each) for name, each in self.sent if isinstance(each, Handed)]
        self.sent.clear()
        return found

    def settle(self, handed: tuple[str, Handed], fate: str) -> None:
        device = next(each for each in self.devices if each.name == handed[0])
        self.jobs.handle(device, Settled(handed[1].token, fate))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.mark.parametrize("fate", [Fate.ACKNOWLEDGED, Fate.REJECTED, Fate.REQUEUED])
def test_device_with_fewest_gets_a_message_and_says_what_becomes_of_it(
    fleet: Fleet, fate: str
) -> None:
    first = fleet.hand("a")
    fleet.hand("b")
    handed = fleet.handed()
    assert [name for name, _ in handed] == ["cuda:0", "cuda:1"]
    fleet.settle(handed[0], fate)
    assert first.told == [fate]
    fleet.hand("c")
    assert [name for name, _ in fleet.handed()] == ["cuda:0"]


def test_messages_wait_for_a_device_that_is_ready(fleet: Fleet) -> None:
    for device in fleet.devices:
        device.state = State.STARTING
    fleet.hand("a")
    assert fleet.handed() == []
    fleet.devices[1].state = State.READY
    fleet.jobs.handle(fleet.devices[1], Ready(pid=1, load_s=0.0))
    assert [name for name, _ in fleet.handed()] == ["cuda:1"]


def test_another_device_gets_what_a_dead_one_had_and_hears_what_had_begun(fleet: Fleet) -> None:
    fleet.devices[1].state = State.STARTING
    for name in "abc":
        fleet.hand(name)
    fleet.handed()
    fleet.devices[0].state, fleet.devices[1].state = State.DEAD, State.READY
    running = WatchedBatch(Running(1, "work", ["a", "b"], None))
    fleet.jobs.leave(fleet.devices[0], [running], is_death=True)
    deaths = {each.raw["headers"]["id"]: each.deaths for _, each in fleet.handed()}
    assert deaths == {"a": Deaths(0, 2), "b": Deaths(0, 2), "c": None}
    fleet.devices[0].state = State.READY
    alone = WatchedBatch(Running(2, "work", ["a"], None, is_alone=True))
    fleet.jobs.leave(fleet.devices[1], [alone], is_death=True)
    assert dict(enumerate(each.deaths for _, each in fleet.handed()))[0] == Deaths(1)


def test_job_that_took_too_long_is_said_to_have(fleet: Fleet) -> None:
    fleet.hand("a")
    fleet.handed()
    batch = WatchedBatch(Running(1, "work", ["a"], 3.0))
    batch.expired = True
    fleet.jobs.leave(fleet.devices[0], [batch], is_death=True)
    [(_, handed)] = fleet.handed()
    assert handed.expired_s == 3.0


def test_what_has_not_begun_is_dropped_with_the_connection_and_comes_again(fleet: Fleet) -> None:
    fleet.jobs.connect("one")
    runs, waits = fleet.hand("runs"), fleet.hand("waits")
    before = fleet.handed()
    fleet.jobs.connect("two")
    assert [each for _, each in fleet.sent] == [Forget(), Forget()]
    fleet.settle(before[1], Fate.FORGOTTEN)
    fleet.handed()
    again, anew = fleet.hand("runs", redelivered=True), fleet.hand("waits", redelivered=True)
    [handed] = fleet.handed()
    assert handed[1].raw["headers"]["id"] == "waits"
    fleet.settle(before[0], Fate.ACKNOWLEDGED)
    fleet.settle(handed, Fate.ACKNOWLEDGED)
    assert (runs.told, waits.told) == ([], [])
    assert again.told == anew.told == [Fate.ACKNOWLEDGED]


def test_message_of_a_job_that_ended_without_a_connection_runs_no_second_time(
    fleet: Fleet,
) -> None:
    fleet.jobs.connect("one")
    fleet.hand("a")
    [handed] = fleet.handed()
    fleet.jobs.connect("two")
    fleet.settle(handed, Fate.ACKNOWLEDGED)
    again = fleet.hand("a", redelivered=True)
    assert again.told == [Fate.ACKNOWLEDGED]
    assert fleet.handed() == []
