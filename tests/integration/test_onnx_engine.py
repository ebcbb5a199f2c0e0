"""A real worker with engine onnx: labels of torch, and one line for a file that does not suit."""

import sys
from collections import Counter
from pathlib import Path
from subprocess import run

import pytest
from celery import Celery

from conftest import StartWorker
from support.patience import patient
from support.tiny_models import save_model

TIMEOUT_S = patient(120)

LABELS = ("animal", "weather", "trade")


def test_a_worker_classifies_as_torch_does_and_says_what_is_wrong_with_a_file(
    start_worker: StartWorker, client: Celery, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder, "bert", LABELS)
    export = [sys.executable, "-m", "batchery", "export", "classification", str(folder)]
    made = run(export, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    file = folder / "onnx" / "model.onnx"
    assert made.stdout.strip() == str(file)
    table = f'kind = "classification"\nmodel = "{folder}"\n'
    (tmp_path / "batchery.toml").write_text(
        f'[models.usual]\n{table}forward = "padded"\n[models.mood]\n{table}engine = "onnx"\n'
    )
    worker = start_worker("batchery.app", "-Q", "usual,mood")
    texts = [f"{'the cat and the dog ' * (number % 17)}rain {number}" for number in range(100)]
    jobs = {
        task: [client.send_task(task, [text], {"top_k": 3}, queue=task) for text in texts]
        for task in ("usual", "mood")
    }
    usual, mood = ([job.get(timeout=TIMEOUT_S) for job in each] for each in jobs.values())
    assert len(Counter(each["tokens"] for each in mood)) > 10
    for one, other in zip(mood, usual, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["scores"] == pytest.approx(other["scores"], abs=5e-6)
    assert worker.stop() == 0

    file.write_bytes(file.read_bytes()[:100])
    worker = start_worker("batchery.app", "-Q", "mood", ready=False)
    assert worker.wait_exit() == 2
    assert "model.onnx failed:" in worker.log
