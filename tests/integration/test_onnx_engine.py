"""Real workers with engine onnx: labels of torch, models that share memory, and other versions."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from apps import shop
from batchery.cli.control import reload
from benchmarks.engine.onnx_file import export_onnx
from conftest import StartWorker
from support.harness import Worker
from support.patience import patient
from support.tiny_models import save_model

TIMEOUT_S = patient(120)

LABELS = ("animal", "weather", "trade")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with its ONNX file; not to be changed."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    save_model(folder, "bert", LABELS)
    export_onnx(folder, "SequenceClassification")
    return folder


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def copy_labelled(exported: Path, folder: Path, prefix: str) -> Path:
    """A copy whose labels begin with a prefix."""
    shutil.copytree(exported, folder)
    config = json.loads((folder / "config.json").read_text())
    labels = {str(number): f"{prefix}-{label}" for number, label in enumerate(LABELS)}
    config |= {"id2label": labels, "label2id": {label: int(key) for key, label in labels.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def cut_short(folder: Path) -> None:
    """Damages the file; those who have the old one keep it."""
    file = folder / "onnx" / "model.onnx"
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:100])


def write_settings(folder: Path, models: dict[str, Path], *top: str, engine: str = "onnx") -> None:
    sections = [
        f'[models.{name}]\nkind = "classification"\nmodel = "{path}"\nengine = "{engine}"\n'
        for name, path in models.items()
    ]
    with (folder / "batchery.toml").open("a") as file:
        file.writelines(f"{line}\n" for line in (*top, *sections))


def send(client: Celery, name: str, texts: Iterable[str]) -> list[Any]:
    return [client.send_task(name, [text], {"top_k": 3}, queue=name) for text in texts]


def read_labels(client: Celery, name: str) -> set[str]:
    """What the labels of a few jobs begin with."""
    jobs = send(client, name, [f"the cat {number}" for number in range(5)])
    return {job.get(timeout=TIMEOUT_S)["label"].partition("-")[0] for job in jobs}


def test_a_worker_classifies_as_torch_does_and_says_what_is_wrong_with_a_file(
    start_worker: StartWorker, client: Celery, exported: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    write_settings(tmp_path, {"usual": folder}, engine="transformers")
    write_settings(tmp_path, {"mood": folder})
    worker = start_worker("batchery.app", "-Q", "usual,mood")
    texts = [f"{'the cat and the dog ' * (number % 17)}rain {number}" for number in range(100)]
    jobs = [send(client, task, texts) for task in ("usual", "mood")]
    usual, mood = ([job.get(timeout=TIMEOUT_S) for job in each] for each in jobs)
    assert len(Counter(each["tokens"] for each in mood)) > 10
    for one, other in zip(mood, usual, strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["scores"] == pytest.approx(other["scores"], abs=5e-6)
    assert worker.stop() == 0

    cut_short(folder)
    worker = start_worker("batchery.app", "-Q", "mood", ready=False)
    assert worker.wait_exit() == 2
    (line,) = [line for line in worker.log.splitlines() if "CRITICAL" in line]
    assert "model.onnx cannot be loaded; copy it again with its weights, or export it" in line


def load_version(name: str, *options: object) -> tuple[int, str]:
    """Exit code and output of `batchery reload`."""
    arguments = [name, *map(str, options), "-A", "apps.shop", "--timeout", "0.5"]
    done = CliRunner().invoke(reload, arguments)
    return done.exit_code, done.output


def test_a_version_takes_the_place_of_another_and_one_that_does_not_load_does_not(
    start_worker: StartWorker, client: Celery, exported: Path, tmp_path: Path
) -> None:
    folders = {prefix: copy_labelled(exported, tmp_path / prefix, prefix) for prefix in "ab"}
    write_settings(tmp_path, {"mood": folders["a"]})
    worker: Worker = start_worker("batchery.app", "-Q", "mood").wait_answers(client)
    assert read_labels(client, "mood") == {"a"}
    code, output = load_version("mood", "--model", folders["b"])
    assert (code, read_labels(client, "mood")) == (0, {"b"}), output
    # The file alone has changed.
    os.utime(folders["b"] / "onnx" / "model.onnx")
    code, output = load_version("mood", "--model", folders["b"])
    version, _, before = output.partition(" is version ")[2].partition(", before it was ")
    assert (code, len(version)) == (0, 12), output
    assert not before.startswith(version)
    cut_short(folders["b"])
    for folder in (folders["b"], tmp_path / "nowhere"):
        code, output = load_version("mood", "--model", folder)
        assert (code, len(output.splitlines())) == (1, 1), output
        assert "not reloaded, mood goes on as before: " in output
        assert read_labels(client, "mood") == {"b"}
    assert "model.onnx cannot be loaded; " in load_version("mood", "--model", folders["b"])[1]
    assert "device process for cpu died" not in worker.log
