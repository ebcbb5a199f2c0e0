"""Feeders of a card: same numbers as without, and every job answered whoever is killed.

`CHAOS_FACTOR=10 make test TESTS=tests/integration/test_feeders.py` kills so many times more.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from celery import Celery
from celery.result import AsyncResult

from batchery import DeviceDied, InvalidItem, to_numpy
from conftest import StartWorker
from support.harness import (
    PYTHONPATH,
    Worker,
    command_line,
    queue_length,
    unsettled,
    wait_ended,
    wait_for,
)
from support.patience import TIMEOUT_S, patient

#: How many times more texts and kills than usual.
FACTOR = int(os.environ.get("CHAOS_FACTOR", "1"))

TEXTS = [f"text {number} " + "word " * (number % 40) for number in range(240)]

#: Ends the process of the card where it has this token in a pass.
LETHAL = """
import os, sys
if "batchery_worker.feeders.card_process" in sys.orig_argv:
    from batchery_worker.models.embedding import EmbeddingModel
    forward = EmbeddingModel.forward
    def die(self, batch, **keywords):
        if any(29145 in prepared[0] for prepared in batch):
            os.abort()
        return forward(self, batch, **keywords)
    EmbeddingModel.forward = die
"""

#: A text with that token.
ZEBRA = "zebra"


@pytest.fixture
def settings(tmp_path: Path, minilm_path: Path) -> Path:
    path = tmp_path / "batchery.toml"
    model = f'kind = "embedding"\nmodel = "{minilm_path}"\n'
    path.write_text(f"[models.plain]\n{model}[models.embed]\n{model}feeders = 2\n")
    return path


def find_processes(worker: Worker, name: str) -> list[psutil.Process]:
    children = psutil.Process(worker.pid).children()
    return [each for each in children if f"batchery_worker.{name}" in command_line(each)]


def find_feeders(worker: Worker, client: Celery) -> list[int]:
    devices = worker.inspect(client, "stats")["pool"]["devices"]
    return [devices[f"cpu/embed/{number}"]["pid"] for number in (1, 2)]


def holds_fewer(redis_url: str, count: int) -> bool:
    return queue_length(redis_url, "embed") + unsettled(redis_url) < count


def send(client: Celery, name: str, items: list[Any], **keywords: Any) -> list[AsyncResult[Any]]:
    return [client.send_task(name, (item,), keywords, queue=name) for item in items]


def test_feeders_give_the_numbers_of_the_device_alone(
    start_worker: StartWorker, client: Celery, settings: Path
) -> None:
    worker = start_worker("batchery.app")
    ids = [2023, 2003, 1037]
    found, expected = (
        [job.get(timeout=TIMEOUT_S) for job in send(client, name, [*TEXTS, ids])]
        for name in ("embed", "plain")
    )
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    vectors, others = (np.array([to_numpy(each) for each in part]) for part in (found, expected))
    assert np.abs(vectors - others).max() < 1e-5
    assert np.abs(vectors[0] - vectors[1]).max() > 0.01

    keywords = {"dimensions": 8, "encoding": "base64"}
    (one,) = send(client, "embed", ["short"], **keywords)
    assert to_numpy(one.get(timeout=TIMEOUT_S)).shape == (8,)
    for item, given in (("", {}), (["x"], {}), ("text", {"dimensions": 999})):
        (job,) = send(client, "embed", [item], **given)
        with pytest.raises(InvalidItem):
            job.get(timeout=TIMEOUT_S)
    # More than one slot has room for.
    many = {"batchery": {"v": 1, "n": 5000}}
    job = client.send_task("embed", (["a", ""] * 2500,), queue="embed", headers=many)
    entries = job.get(timeout=TIMEOUT_S)
    assert ["ok" in entry for entry in entries] == [True, False] * 2500
    assert len({str(entry) for entry in entries}) == 2

    for feeder in find_feeders(worker, client):
        maps = Path(f"/proc/{feeder}/maps").read_text()
        assert "libtorch" not in maps
        assert "memfd:batchery-feeder" in maps
    assert worker.stop() == 0


@pytest.mark.timeout(300 * FACTOR)
def test_every_job_is_answered_whoever_is_killed(
    start_worker: StartWorker, client: Celery, settings: Path, redis_url: str
) -> None:
    worker = start_worker("batchery.app", "-Q", "embed", env={"LEASE_EXPIRY_S": "2"})
    jobs = send(client, "embed", TEXTS * 4 * FACTOR)
    kills = 2 * FACTOR
    for kill in range(kills):
        left = len(jobs) - (kill + 1) * len(jobs) // (kills + 2)
        wait_for(partial(holds_fewer, redis_url, left), f"{left} are left", TIMEOUT_S)
        is_there = partial(find_processes, worker, ("device", "feeders")[kill % 2])
        process = wait_for(is_there, "a process to kill")[0]
        process.kill()
    vectors = [to_numpy(job.get(timeout=TIMEOUT_S)) for job in jobs]
    parts = [np.array(vectors[start :: len(TEXTS)]) for start in range(len(TEXTS))]
    assert max(np.ptp(part, axis=0).max() for part in parts) < 1e-5
    wait_for(lambda: unsettled(redis_url) == 0, "nothing is leased")

    jobs = send(client, "embed", TEXTS * 2)
    wait_for(lambda: any(job.ready() for job in jobs), "they have begun")
    processes = psutil.Process(worker.pid).children()
    worker.process.kill()
    wait_ended(processes, patient(20))
    start_worker("batchery.app", "-Q", "embed")
    for job in jobs:
        assert len(job.get(timeout=TIMEOUT_S)["vector"]) == 384


def test_a_text_that_ends_the_card_fails_alone(
    start_worker: StartWorker, client: Celery, settings: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LETHAL)
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}"}
    start_worker("batchery.app", "-Q", "embed", env=env)
    jobs = send(client, "embed", [*TEXTS[:3], ZEBRA, *TEXTS[3:6]])
    poison = jobs.pop(3)
    for job in jobs:
        assert len(job.get(timeout=TIMEOUT_S)["vector"]) == 384
    with pytest.raises(DeviceDied):
        poison.get(timeout=TIMEOUT_S)
