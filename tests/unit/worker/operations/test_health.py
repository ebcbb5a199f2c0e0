"""The policy: what makes a worker not ready, and what makes it not live."""

from types import SimpleNamespace
from typing import Any

import pytest
from celery import bootsteps

from batchery.settings import Settings
from batchery.transport.membership import BEATS_PER_EXPIRY
from batchery_worker.device_pool.process import State
from batchery_worker.operations import watch
from batchery_worker.operations.watch import REDIS_GRACE_S, WorkerWatch

NOW_S = 10_000.0


def device(
    name: str = "cpu",
    *,
    state: State = State.READY,
    silent_s: float = 0.0,
    is_hung: bool = False,
) -> Any:
    return SimpleNamespace(name=name, state=state, silent_s=lambda _: silent_s, is_hung=is_hung)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "monotonic", lambda: NOW_S)


def judge(
    *devices: Any,
    is_connected: bool = True,
    unheard_s: float = 0.5,
    pause_s: float = 1.0,
    is_silent: bool = False,
    max_pass_s: float | None = None,
) -> tuple[str, str]:
    beats = SimpleNamespace(
        beat_s=NOW_S - unheard_s, expiry_s=pause_s * BEATS_PER_EXPIRY, is_silent=is_silent
    )
    consumer = SimpleNamespace(
        task_consumer=SimpleNamespace(channel="a channel"),
        connection=is_connected,
        blueprint=SimpleNamespace(state=bootsteps.RUN),  # type: ignore[attr-defined]
    )
    fleet = SimpleNamespace(devices=devices, holding=SimpleNamespace(serving=beats))
    worker = SimpleNamespace(fleet=fleet, consumer=consumer)
    return WorkerWatch(worker, Settings(max_pass_s=max_pass_s)).judge()


def test_worker_that_consumes_with_its_models_loaded_is_live_and_ready() -> None:
    assert judge(device()) == ("", "")
    # Ordinary tasks need no device.
    assert judge() == ("", "")


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        ({"is_connected": False}, "the worker does not consume its queues"),
        ({"is_silent": True}, "Redis does not answer"),
        ({"unheard_s": 3.1}, "Redis does not answer"),
    ],
)
def test_worker_that_cannot_run_jobs_now_is_not_ready_and_goes_on_living(
    seen: dict[str, Any], why: str
) -> None:
    assert judge(device(), **seen) == ("", why)


def test_all_reasons_are_named() -> None:
    two = (device("cuda:0"), device("cuda:1", state=State.STARTING))
    assert judge(*two, is_connected=False, is_silent=True)[1] == (
        "device cuda:1 is not ready; the worker does not consume its queues; Redis does not answer"
    )


def test_slow_heartbeats_may_be_as_rare_as_they_are() -> None:
    assert judge(unheard_s=20, pause_s=12.0) == ("", "")
    assert judge(unheard_s=20, pause_s=6.0)[1] == "Redis does not answer"


def test_lost_redis_makes_a_worker_not_live_only_after_a_long_grace() -> None:
    assert judge(unheard_s=REDIS_GRACE_S)[0] == ""
    why = "Redis has not answered for 601 s"
    assert judge(unheard_s=REDIS_GRACE_S + 1) == (why, why)


def test_device_without_a_sign_is_dead_only_if_there_is_a_limit() -> None:
    silent = device(silent_s=3.2)
    assert judge(silent) == ("", "")
    assert judge(silent, max_pass_s=4.0) == ("", "")
    why = "device cpu has work, and gave no sign for 3.2 s"
    assert judge(silent, max_pass_s=3.0) == (why, why)


def test_device_that_hung_is_dead_until_another_process_is_ready() -> None:
    why = "device cpu hung, and is being replaced"
    assert judge(device(state=State.STARTING, is_hung=True), max_pass_s=3.0) == (why, why)
