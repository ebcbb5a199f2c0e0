"""What functions may await and start in a device process, as in any process of Celery's."""

import signal

import pytest

from apps import households
from conftest import StartWorker
from support.harness import Worker
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def shared(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.households", "-c", "1")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    households.app.conf.update(broker_url=redis_url, result_backend=redis_url)


# Jobs that a function awaits


def test_a_function_that_awaits_a_job_fails_at_once(shared: Worker) -> None:
    job = households.awaiting.delay(False)
    with pytest.raises(RuntimeError, match=r"Never call result\.get\(\) within a task"):
        job.get(timeout=TIMEOUT_S)


def test_a_function_that_knows_better_may_await_a_job(shared: Worker) -> None:
    assert households.awaiting.delay(True).get(timeout=TIMEOUT_S) == 3
    # Not for ever.
    with pytest.raises(RuntimeError, match="Never call"):
        households.awaiting.delay(False).get(timeout=TIMEOUT_S)


# Children


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_commands_that_a_function_starts_are_ended_by_signals(shared: Worker, number: int) -> None:
    assert households.end_command.delay(number).get(timeout=TIMEOUT_S) == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_forks_of_a_device_are_ended_by_signals(shared: Worker, number: int) -> None:
    assert households.end_fork.delay(number).get(timeout=TIMEOUT_S) == -number


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_pool_of_processes_in_a_function_ends(shared: Worker, method: str) -> None:
    assert households.pooled.delay(method).get(timeout=TIMEOUT_S) == [1, 2, 3]


def test_torch_loads_data_by_processes_in_a_function(shared: Worker) -> None:
    assert households.loaded.delay(2).get(timeout=TIMEOUT_S) == [1, 5, 9, 13]


def test_a_device_outlives_the_signals_of_its_process_group(shared: Worker) -> None:
    # A device that only starts has not set its signals: what answers has.
    households.pid.delay(0).get(timeout=TIMEOUT_S)
    (device,) = shared.devices()
    job = households.pid.delay(0.5)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        device.send_signal(number)
    assert job.get(timeout=TIMEOUT_S) == device.pid
    assert households.pid.delay(0).get(timeout=TIMEOUT_S) == device.pid
