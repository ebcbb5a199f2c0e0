"""The policy: what makes a worker not ready, and what makes it not live."""

import pytest

from batchery_worker.operations import health
from batchery_worker.operations.health import REDIS_GRACE_S, DeviceSight, Verdict, WorkerSight

FINE = WorkerSight([DeviceSight("cpu", is_ready=True)], is_connected=True, unheard_s=0.5)


def judge(sight: WorkerSight, max_pass_s: float | None = None) -> Verdict:
    return health.judge(sight, max_pass_s)


def test_worker_that_consumes_with_its_models_loaded_is_live_and_ready() -> None:
    assert judge(FINE) == Verdict("", "")
    # Ordinary tasks need no device.
    assert judge(FINE._replace(devices=[])) == Verdict("", "")


@pytest.mark.parametrize(
    ("sight", "why"),
    [
        (FINE._replace(devices=None), "the devices have not started"),
        (FINE._replace(devices=[DeviceSight("cpu", False)]), "device cpu is not ready"),
        (FINE._replace(is_connected=False), "the worker does not consume its queues"),
        (FINE._replace(still_s=29.0), ""),
        (FINE._replace(still_s=31.4), "the event loop has stood still for 31 s"),
        (FINE._replace(is_silent=True), "Redis does not answer"),
        (FINE._replace(unheard_s=3.1), "Redis does not answer"),
    ],
)
def test_worker_that_cannot_run_jobs_now_is_not_ready_and_goes_on_living(
    sight: WorkerSight, why: str
) -> None:
    assert judge(sight) == Verdict("", why)


def test_all_reasons_are_named() -> None:
    two = [DeviceSight("cuda:0", True), DeviceSight("cuda:1", False)]
    sight = WorkerSight(two, is_connected=False, is_silent=True)
    assert judge(sight).not_ready == (
        "device cuda:1 is not ready; the worker does not consume its queues; Redis does not answer"
    )


def test_slow_heartbeats_may_be_as_rare_as_they_are() -> None:
    late = FINE._replace(unheard_s=20)
    assert judge(late._replace(beat_pause_s=12.0)) == Verdict("", "")
    assert judge(late._replace(beat_pause_s=6.0)).not_ready == "Redis does not answer"


def test_lost_redis_makes_a_worker_not_live_only_after_a_long_grace() -> None:
    assert judge(FINE._replace(unheard_s=REDIS_GRACE_S)).not_live == ""
    dead = judge(FINE._replace(unheard_s=REDIS_GRACE_S + 1))
    assert dead.not_live == dead.not_ready == "Redis has not answered for 601 s"


def test_device_without_a_sign_is_dead_only_if_there_is_a_limit() -> None:
    silent = FINE._replace(devices=[DeviceSight("cpu", True, silent_s=3.2)])
    assert judge(silent) == Verdict("", "")
    assert judge(silent, max_pass_s=4.0) == Verdict("", "")
    why = "device cpu has work, and gave no sign for 3.2 s"
    assert judge(silent, max_pass_s=3.0) == Verdict(why, why)


def test_device_that_hung_is_dead_until_another_process_is_ready() -> None:
    hung = FINE._replace(devices=[DeviceSight("cpu", False, is_hung=True)])
    why = "device cpu hung, and is being replaced"
    assert judge(hung, max_pass_s=3.0) == Verdict(why, why)
