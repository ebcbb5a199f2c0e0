"""A rank of a group dies or hangs: the whole device ends, and leaves no process behind."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from batchery import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from conftest import StartWorker
from support.harness import START_S, Worker, has_ended, wait_ended, wait_for
from support.patience import patient
from support.tiny_models import CORPUS, run, save_model

TIMEOUT_S = patient(120)

#: Each death costs a start.
pytestmark = pytest.mark.timeout(patient(600))

DEVICE = "cpu:0+cpu:1"

TEXTS = [" ".join(CORPUS[number % 4].split()[: 1 + number % 9]) for number in range(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sliced")
    save_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def vectors(folder: Path) -> dict[str, list[float]]:
    """What one process makes of each text."""
    alone = EmbeddingModel(ModelSettings(kind="embedding", model=str(folder)))
    alone.load("cpu")
    return {text: result["vector"] for text, result in zip(TEXTS, run(alone, TEXTS), strict=True)}


def serve(start_worker: StartWorker, cwd: Path, folder: Path, options: str = "") -> Worker:
    (cwd / "batchery.toml").write_text(
        f'devices = ["{DEVICE}"]\n{options}\n'
        f'[models.vectors]\nkind = "embedding"\nmodel = "{folder}"\n'
    )
    return start_worker("batchery.app", "-Q", "vectors", cwd=cwd)


def ranks(worker: Worker) -> list[psutil.Process]:
    """Rank 0 and its peer, once all are there."""

    def find() -> list[psutil.Process]:
        devices = worker.devices()
        guards = [child for device in devices for child in device.children()]
        return [*devices, *(peer for guard in guards for peer in guard.children())]

    return wait_for(lambda: found if len(found := find()) == 2 else [], "two ranks", START_S)


def kill_in_rounds(
    worker: Worker,
    client: Celery,
    vectors: dict[str, list[float]],
    victims: Sequence[int],
    jobs: int,
) -> None:
    """Sends jobs in rounds, and kills a rank in the midst of each."""
    choose = random.Random(31)
    task = client.signature("vectors", queue="vectors")
    for victim in victims:
        texts = choose.choices(TEXTS, k=jobs)
        group = ranks(worker)
        task.delay(texts[0]).get(timeout=TIMEOUT_S)
        sent = [task.delay(text) for text in texts]
        # Somewhere among their passes.
        time.sleep(choose.uniform(0, 0.05))
        group[victim].kill()
        for text, job in zip(texts, sent, strict=True):
            assert job.get(timeout=TIMEOUT_S)["vector"] == pytest.approx(vectors[text], abs=1e-5)
        wait_ended(group)


def test_no_job_is_lost_with_a_rank(
    start_worker: StartWorker,
    client: Celery,
    tmp_path: Path,
    folder: Path,
    vectors: dict[str, list[float]],
) -> None:
    worker = serve(start_worker, tmp_path, folder)
    kill_in_rounds(worker, client, vectors, victims=[1, 0], jobs=70)
    group = ranks(worker)
    worker.process.kill()
    worker.wait_exit()
    wait_ended(group)


def test_a_rank_that_hangs_ends_its_group(
    start_worker: StartWorker,
    client: Celery,
    tmp_path: Path,
    folder: Path,
    vectors: dict[str, list[float]],
) -> None:
    worker = serve(start_worker, tmp_path, folder, "max_pass_s = 3")
    group = ranks(worker)
    group[1].suspend()
    job: Any = client.signature("vectors", queue="vectors").delay(TEXTS[0])
    wait_for(lambda: all(has_ended(each.pid) for each in group), "both ranks end", TIMEOUT_S)
    assert job.get(timeout=TIMEOUT_S)["vector"] == pytest.approx(vectors[TEXTS[0]], abs=1e-5)
