"""Groups of processes: results are those of one process."""

from pathlib import Path
from typing import Any

import pytest

from batchery import Engine, ModelSettings
from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel
from conftest import StartWorker
from support.patience import patient
from support.tiny_models import CORPUS, run, save_model
from support.tiny_writers import PlainWriter, make_prompts, save_writer

TIMEOUT_S = patient(120)

TEXTS = [*CORPUS, "a dog", "tea", *CORPUS[::-1]]


def alone(kind: type[Any], settings: ModelSettings) -> list[Any]:
    """What this process makes of the texts."""
    model = kind(settings)
    model.load("cpu")
    return run(model, TEXTS)


def assert_equal(results: list[Any], expected: list[Any], field: str) -> None:
    for result, one in zip(results, expected, strict=True):
        assert result[field] == pytest.approx(one[field], abs=1e-5)


@pytest.mark.timeout(patient(300))
def test_four_ranks_make_the_vectors_of_one(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", num_key_value_heads=4)
    settings = ModelSettings(kind="embedding", model=str(tmp_path))
    with Engine(settings, device="cpu:0+cpu:1+cpu:2+cpu:3", process=True) as engine:
        results = [engine.call(text) for text in TEXTS]
    assert_equal(results, alone(EmbeddingModel, settings), "vector")


@pytest.mark.timeout(patient(300))
def test_two_ranks_serve_several_models_and_write_texts(
    start_worker: StartWorker, client: Any, tmp_path: Path
) -> None:
    writer = save_writer(tmp_path / "writer")
    save_model(tmp_path / "vectors", "llama")
    save_model(tmp_path / "labels", "llama", labels=("no", "yes", "maybe"))
    (tmp_path / "batchery.toml").write_text(
        'devices = ["cpu:0+cpu:1"]\n'
        '[models.labels]\nkind = "classification"\nmodel = "labels"\n'
        '[models.vectors]\nkind = "embedding"\nmodel = "vectors"\n'
        '[models.chat]\nkind = "generation"\nmodel = "writer"\nslots = 4\n'
    )
    start_worker("batchery.app", "-Q", "labels,vectors,chat", cwd=tmp_path)
    prompts = make_prompts(12)

    def send(name: str, items: list[Any], **keywords: Any) -> list[Any]:
        task = client.signature(name, queue=name)
        return [task.delay(item, **keywords) for item in items]

    def settings(name: str, kind: Any) -> ModelSettings:
        return ModelSettings(kind=kind, model=str(tmp_path / name))

    labels, vectors = send("labels", TEXTS), send("vectors", TEXTS)
    written = send("chat", prompts, max_new_tokens=10)
    results = [job.get(timeout=TIMEOUT_S) for job in vectors]
    assert_equal(results, alone(EmbeddingModel, settings("vectors", "embedding")), "vector")
    expected = alone(ClassificationModel, settings("labels", "classification"))
    assert_equal([job.get(timeout=TIMEOUT_S) for job in labels], expected, "score")
    plain = PlainWriter(writer)
    texts = [job.get(timeout=TIMEOUT_S)["text"] for job in written]
    assert texts == [plain.text(plain.write(prompt, 10)) for prompt in prompts]
