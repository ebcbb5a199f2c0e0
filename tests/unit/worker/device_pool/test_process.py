"""One device, whose processes come and go; they are fakes."""

from collections.abc import Iterator
from typing import Any

import pytest

from batchery_worker.device_pool.process import MAX_BACKOFF_S, DeviceProcess, State, start_process
from batchery_worker.in_flight import DispatchedBatch
from batchery_worker.ipc.messages import Done, Ready, Setup, Work
from batchery_worker.job import Batch
from support.fake_devices import FakeDevices

SETUP = Setup("cuda:1", [], "shop:app", [], [], {"": 30})
WORK = Work(7, "shop.shout", {}, [("a", ["x"], False)], 64, None)


def dispatched(alone: bool = False) -> DispatchedBatch:
    job: Any = "a job"
    return DispatchedBatch(Batch((job,), alone), 0.0)


@pytest.fixture
def unborn(devices: FakeDevices) -> Iterator[DeviceProcess]:
    """Not spawned yet."""
    made = DeviceProcess(SETUP, start_process)
    yield made
    made.stop(kill_at_once=True)


@pytest.fixture
def device(unborn: DeviceProcess) -> DeviceProcess:
    """Spawned and ready."""
    unborn.spawn()
    (reply,) = unborn.receive()
    assert isinstance(reply, Ready)
    unborn.state = State.READY
    return unborn


def test_a_process_is_told_its_setup_and_then_its_batches(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    (fake,) = devices.started
    assert device.send(WORK, dispatched())
    assert fake.hear() == [WORK]
    assert fake.setups == [SETUP]
    fake.answer()
    (done,) = device.receive()
    assert isinstance(done, Done)
    assert (done.id, done.jobs) == (7, (("needs tracer", ("value", "x")),))


def test_onednn_cache_is_small_unless_the_environment_sets_it(
    unborn: DeviceProcess, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_worker.device_pool.process.os.cpu_count", lambda: 4)
    monkeypatch.setenv("SHOP", "open")
    unborn.spawn()
    assert devices.started[0].environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"
    assert devices.started[0].environment["SHOP"] == "open"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    unborn.reap()
    unborn.spawn()
    assert devices.started[1].environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"


def test_threads_of_a_pass_spin_for_a_moment_unless_the_environment_says_how_long(
    unborn: DeviceProcess, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    unborn.spawn()
    assert devices.started[0].environment["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    unborn.reap()
    unborn.spawn()
    assert devices.started[1].environment["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    # The count would outrank it.
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    unborn.reap()
    unborn.spawn()
    assert "GOMP_SPINCOUNT" not in devices.started[2].environment


def test_device_takes_two_batches_and_none_next_to_a_suspect(device: DeviceProcess) -> None:
    assert device.has_room
    device.hold(1, dispatched())
    assert device.has_room
    device.hold(2, dispatched())
    assert not device.has_room
    assert len(device.take_batches()) == 2
    device.hold(3, dispatched(alone=True))
    assert device.alone
    assert not device.has_room


@pytest.mark.parametrize("state", [each for each in State if each is not State.READY])
def test_device_that_is_not_ready_takes_no_batch(device: DeviceProcess, state: State) -> None:
    device.state = state
    assert not device.has_room
    assert device.figures()["state"] == state.name.lower().replace("_", " ")


def test_probe_may_ask_for_a_sign_while_batches_come_and_go(device: DeviceProcess) -> None:
    class Looked:
        """Another batch comes between the looks at two of them, as on another thread."""

        @property
        def excused_until_s(self) -> float:
            device.batches[len(device.batches)] = dispatched()
            return 0.0

    batches: Any = device.batches
    batches.update({0: Looked(), 1: Looked()})
    device.heard_s = 5.0
    assert device.silent_s(12.0) == 7.0


@pytest.mark.parametrize(
    ("deaths", "backoff_s"),
    [(0, 0.0), (1, 0.1), (2, 0.2), (5, 1.6), (9, 25.6), (10, MAX_BACKOFF_S), (9999, MAX_BACKOFF_S)],
)
def test_the_pause_before_a_restart_grows_up_to_a_limit(deaths: int, backoff_s: float) -> None:
    assert DeviceProcess(SETUP, start_process, deaths=deaths).backoff_s == pytest.approx(backoff_s)


@pytest.mark.parametrize(
    ("code", "how"), [(-9, "killed by signal 9"), (-11, "killed by signal 11"), (3, "exit code 3")]
)
def test_death_is_described_in_words(
    device: DeviceProcess, devices: FakeDevices, code: int, how: str
) -> None:
    devices.started[0].die(code)
    with pytest.raises(EOFError):
        device.receive()
    assert device.reap() == how
    assert (device.state, device.deaths, device.failed_starts) == (State.DEAD, 1, 0)


def test_death_by_the_worker_is_told_from_others(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    device.kill("as it hung")
    assert device.reap() == "killed by its worker, as it hung"
    device.spawn()
    devices.started[1].die(-9)
    assert device.reap() == "killed by signal 9"


def test_messages_of_a_dead_process_are_still_read(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    device.send(WORK, dispatched())
    devices.started[0].answer()
    devices.started[0].die()
    assert [type(reply) for reply in device.receive()] == [Done]
    with pytest.raises(EOFError):
        device.receive()


def test_a_batch_for_a_process_that_is_dead_is_dropped(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    devices.started[0].die()
    # Its end of file is what tells; until it is read, nothing else does.
    assert device.send(WORK, dispatched())
    assert list(device.batches) == [WORK.id]


def test_a_process_that_only_closes_its_pipe_is_killed(
    device: DeviceProcess, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake,) = devices.started
    fake.hangs = True
    assert device.reap() == "closed its pipe and was killed"
    assert fake.code == -9


def test_process_that_leaves_when_told_does_not_count_as_a_death(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    (fake,) = devices.started
    device.leave()
    # What it still had to say can be read.
    fake.hear()
    fake.get_ready()
    assert len(device.receive()) == 1
    assert fake.poll() == 0
    with pytest.raises(EOFError):
        device.receive()
    device.reap()
    assert (device.deaths, device.backoff_s) == (0, 0.0)


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_process_that_its_worker_kills_does_not_lengthen_the_next_pause(
    device: DeviceProcess, devices: FakeDevices, is_hung: bool
) -> None:
    """Jobs choose their own time limits, and so how often their device is killed."""
    device.send(WORK, dispatched())
    device.is_hung, device.batches[WORK.id].expired = is_hung, not is_hung
    device.kill()
    device.reap()
    device.take_batches()
    assert (device.deaths, device.backoff_s) == (0, 0.0)


def test_a_process_that_dies_at_its_start_after_a_hang_counts_as_a_death(
    unborn: DeviceProcess, devices: FakeDevices
) -> None:
    devices.get_ready = False
    unborn.is_hung = True
    unborn.spawn()
    devices.started[0].die(1)
    unborn.reap()
    assert unborn.deaths == 1


def test_death_before_ready_counts_as_a_failed_start(
    unborn: DeviceProcess, devices: FakeDevices
) -> None:
    devices.get_ready = False
    unborn.spawn()
    devices.started[0].die(1)
    unborn.reap()
    assert (unborn.failed_starts, unborn.deaths) == (1, 1)


@pytest.mark.parametrize(("hangs", "code"), [(False, 0), (True, -9)], ids=["leaves", "hangs"])
def test_stop_waits_for_the_process_and_kills_a_slow_one(
    device: DeviceProcess, devices: FakeDevices, hangs: bool, code: int
) -> None:
    (fake,) = devices.started
    fake.hangs = hangs
    device.stop(kill_at_once=False)
    assert fake.code == code
    assert device.state is State.DEAD


def test_stop_ends_without_a_process_that_a_driver_holds(
    device: DeviceProcess, devices: FakeDevices, caplog: pytest.LogCaptureFixture
) -> None:
    (fake,) = devices.started
    fake.hangs = True
    # It is killed, and nothing happens.
    fake.kill = lambda: None  # type: ignore[method-assign]
    assert device.stop(kill_at_once=True) == "killed by signal 9"
    assert f"device process {fake.pid} was killed and does not end" in caplog.text


def test_a_process_that_cannot_be_spawned_can_be_spawned_later(
    unborn: DeviceProcess, devices: FakeDevices
) -> None:
    devices.has_room = False
    # A pipe that stayed open would be a warning, and that an error.
    with pytest.raises(OSError, match="temporarily unavailable"):
        unborn.spawn()
    assert (unborn.state, unborn.link) == (State.DEAD, None)
    devices.has_room = True
    unborn.spawn()
    assert unborn.state is State.STARTING


def test_restarted_process_has_no_jobs_and_no_figures(
    device: DeviceProcess, devices: FakeDevices
) -> None:
    device.jobs, device.recycle_due = 50, True
    first = device.pid
    devices.started[0].die()
    device.reap()
    device.spawn()
    assert device.pid != first
    assert (device.state, device.jobs, device.recycle_due) == (State.STARTING, 0, False)


def test_a_probe_sees_how_long_a_device_is_silent_while_batches_come(device: DeviceProcess) -> None:
    class Slow(DispatchedBatch):
        """Meanwhile the thread of the event loop hands over another batch."""

        excused_until_s = property(lambda _: device.batches.update({8: dispatched()}) or 0.0)

    device.batches[7] = Slow.__new__(Slow)
    assert device.silent_s(device.heard_s + 5.0) == 5.0
