"""Batch functions on GPUs: each process has its own, and one whose context is dead ends."""

import os
from pathlib import Path
from typing import Any

import pytest

from apps import two_gpus_app
from batchery import DeviceDied
from conftest import StartWorker
from support.harness import TESTS, wait_for
from support.patience import patient

TIMEOUT_S = patient(120)

#: In front of everything else on the path of the workers: a torch with two GPUs.
FAKE_TORCH = {
    "PYTHONPATH": os.pathsep.join(
        map(str, (Path(two_gpus_app.__file__).parent / "two_gpus", TESTS))
    )
}


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    two_gpus_app.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def test_a_function_has_the_gpu_of_its_process_from_the_first_import_on(
    start_worker: StartWorker,
) -> None:
    start_worker("apps.two_gpus_app", env=FAKE_TORCH)
    seen: dict[str, Any] = {}

    def ask() -> bool:
        for device, *info in two_gpus_app.where.submit_many(range(8)).get(timeout=TIMEOUT_S):
            seen[device] = info
        return len(seen) == 2

    wait_for(ask, "both devices have answered", TIMEOUT_S)
    assert seen == {"cuda:0": [0, [0], {"0": 0.5}], "cuda:1": [1, [1], {"1": 0.5}]}


def test_a_dead_context_ends_its_process_and_fails_no_other_job(start_worker: StartWorker) -> None:
    start_worker("apps.two_gpus_app", env=FAKE_TORCH)
    texts = [f"text {number}" for number in range(12)]
    jobs = [two_gpus_app.fragile.delay(text) for text in [*texts[:6], "bad", *texts[6:]]]
    bad = jobs.pop(6)
    assert [job.get(timeout=TIMEOUT_S) for job in jobs] == [text.upper() for text in texts]
    with pytest.raises(DeviceDied):
        bad.get(timeout=TIMEOUT_S)
    assert two_gpus_app.fragile.delay("next").get(timeout=TIMEOUT_S) == "NEXT"
