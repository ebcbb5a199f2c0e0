"""Groups of processes: results are those of one process."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from apps import shop
from batchery import Engine, ModelSettings
from batchery.cli.control import reload
from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel
from conftest import StartWorker
from support.patience import patient
from support.roles import acting_as
from support.steady_callers import SteadyCallers
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


@pytest.mark.timeout(patient(300))
def test_another_version_takes_the_place_on_both_ranks(
    start_worker: StartWorker, client: Any, redis_url: str, tmp_path: Path
) -> None:
    for version in "ab":
        save_model(tmp_path / version, "llama", labels=(f"{version}0", f"{version}1"))
    (tmp_path / "batchery.toml").write_text(
        'devices = ["cpu:0+cpu:1"]\n[models.labels]\nkind = "classification"\nmodel = "a"\n'
    )
    worker = start_worker("batchery.app", "-Q", "labels", cwd=tmp_path)
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)

    def call() -> list[str]:
        jobs = [client.send_task("labels", [text], queue="labels") for text in TEXTS]
        return [job.get(timeout=TIMEOUT_S)["label"][0] for job in jobs]

    def order(version: str) -> Result:
        # One that is named need not be looked for, which it must answer in time.
        options = ["--model", str(tmp_path / version), "-A", "apps.shop", "--worker", worker.name]
        with acting_as(shop.app, "operator"):
            return CliRunner().invoke(reload, ["labels", *options])

    assert set(call()) == {"a"}
    with SteadyCallers(call, threads=1) as callers:
        assert order("b").exit_code == 0
        assert set(call()) == {"b"}
        done = order("nowhere")
        assert (done.exit_code, "there is no such folder" in done.output) == (1, True)
        # Both ranks are there again, with what they had.
        assert set(call()) == {"b"}
    assert set(callers.answers) <= {"a", "b"}
    assert "Traceback" not in worker.log
