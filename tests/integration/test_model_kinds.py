"""Every built-in kind of model behind a real worker, by settings alone, and in an engine."""

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

import batchery
from batchery import Engine, ModelSettings
from conftest import StartWorker
from support.harness import Worker
from support.patience import patient
from support.tiny_models import save_model

TIMEOUT_S = patient(60)

NLI = ("contradiction", "neutral", "entailment")

#: By kind: labels and head of its model, an item, keywords, and the type of its results.
KINDS: dict[str, tuple[tuple[str, ...], str, Any, dict[str, Any], Any]] = {
    "embedding": ((), "", "the cat", {"truncate": False}, batchery.Embedding),
    "classification": (
        NLI,
        "",
        {"text": "the cat sat", "text_pair": "a cat"},
        {},
        batchery.Classification,
    ),
    "rerank": (("fits",), "", {"query": "cats", "text": "the cat sat"}, {}, batchery.Score),
    "token_classification": (
        ("O", "B-PER", "I-PER"),
        "TokenClassification",
        "the cat sat",
        {"aggregation": "none"},
        batchery.TokenClassification,
    ),
    "zero_shot": (NLI, "", "the cat sat", {"labels": ["a cat", "rain"]}, batchery.Classification),
    "sparse_embedding": ((), "MaskedLM", [4, 5, 6], {"top_k": 3}, batchery.SparseEmbedding),
    "multi_vector_embedding": (
        (),
        "",
        "the cat sat",
        {"encoding": "base64"},
        batchery.MultiVectorEmbedding,
    ),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of a tiny model of each kind."""
    made = {}
    for kind, (labels, head, *_) in KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        save_model(made[kind], "bert", labels, head)
    return made


@pytest.fixture(scope="module")
def worker(
    start_module_worker: StartWorker,
    tmp_path_factory: pytest.TempPathFactory,
    folders: dict[str, Path],
) -> Worker:
    folder = tmp_path_factory.mktemp("settings")
    (folder / "batchery.toml").write_text(
        "\n".join(
            f'[models.{kind}]\nkind = "{kind}"\nmodel = "{path}"' for kind, path in folders.items()
        )
    )
    return start_module_worker("batchery.app", "-Q", ",".join(folders), cwd=folder)


def answer(client: Celery, kind: str, item: Any, **keywords: Any) -> Any:
    sent = client.send_task(kind, [item], keywords, queue=kind)
    return sent.get(timeout=TIMEOUT_S)


@EACH_KIND
def test_a_worker_and_an_engine_give_the_same_result(
    kind: str, worker: Worker, client: Celery, folders: dict[str, Path]
) -> None:
    _, _, item, keywords, result_type = KINDS[kind]
    result = answer(client, kind, item, **keywords)
    assert result_type.model_validate(result).tokens > 2
    settings = ModelSettings.model_validate({"kind": kind, "model": str(folders[kind])})
    with Engine(settings, device="cpu") as engine:
        # A list is many items.
        (same,) = engine.call([item], **keywords)
    assert same.keys() == result.keys()
    assert same["tokens"] == result["tokens"]
