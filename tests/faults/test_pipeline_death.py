"""A worker whose model lies in a pipeline: results, and a death among passes that are under way."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from conftest import StartWorker
from support.harness import wait_ended
from support.patience import patient
from support.tiny_models import CORPUS, run, save_model

TIMEOUT_S = patient(120)

pytestmark = pytest.mark.timeout(patient(300))

DEVICE = "cpu:0+cpu:1+cpu:2+cpu:3"

TEXTS = [" ".join(CORPUS[number % 4].split()[: 1 + number % 9]) for number in range(200)]


def test_no_job_is_lost_with_the_passes_of_a_pipeline(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    save_model(folder, "bert", num_hidden_layers=4)
    settings: Any = {"kind": "embedding", "model": str(folder), "forward": "padded"}
    alone = EmbeddingModel(ModelSettings(**settings))
    alone.load("cpu")
    vectors = {text: each["vector"] for text, each in zip(TEXTS, run(alone, TEXTS), strict=True)}
    (tmp_path / "batchery.toml").write_text(
        f'devices = ["{DEVICE}"]\n'
        f'[models.vectors]\nkind = "embedding"\nmodel = "{folder}"\nsplit = "pipeline"\n'
        "max_batch_tokens = 64\n"
    )
    worker = start_worker("batchery.app", "-Q", "vectors", cwd=tmp_path)
    task = client.signature("vectors", queue="vectors")
    choose = random.Random(31)
    task.delay(TEXTS[0]).get(timeout=TIMEOUT_S)
    for is_killed in (False, True):
        devices = worker.devices()
        sent = [task.delay(text) for text in TEXTS]
        if is_killed:
            # Somewhere among their passes.
            time.sleep(choose.uniform(0, 0.05))
            devices[0].kill()
        for text, job in zip(TEXTS, sent, strict=True):
            assert job.get(timeout=TIMEOUT_S)["vector"] == pytest.approx(vectors[text], abs=1e-5)
        if is_killed:
            wait_ended(devices)
