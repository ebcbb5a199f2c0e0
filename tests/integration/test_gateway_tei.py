"""The routes of Text Embeddings Inference in front of a real worker, with unmodified clients."""

import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from huggingface_hub import InferenceClient

from conftest import StartGateway, StartWorker
from support.gateway import GatewayProcess
from support.served_models import LABELS, save_models

#: Greatest difference of any number between a text alone and in a batch, in fp32.
TOLERANCE = 1e-5

#: Texts of different lengths.
TEXTS = ["the cat", "a dog barked at nine cats in the old garden", "rain falls", "tea and salt"]

Models = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny model of every kind that has a route."""
    made = save_models(tmp_path_factory.mktemp("models"))
    made["embedding"] |= {"aliases": ["bge"], "prompts": {"query": "the cat "}, "max_length": 20}
    return made


@pytest.fixture(scope="module")
def gateway(
    models: Models, start_module_worker: StartWorker, start_gateway: StartGateway
) -> GatewayProcess:
    """A gateway, and a worker with those models."""
    start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    # Its files are not on this machine, and no worker has it.
    far = {"kind": "embedding", "model": "/nowhere/at all", "overflow": "refuse"}
    return start_gateway(models={**models, "far": far})


def post(gateway: GatewayProcess, path: str, body: Any) -> httpx2.Response:
    return gateway.post(path, body)


def answer(gateway: GatewayProcess, path: str, body: Any) -> Any:
    found = post(gateway, path, body)
    assert found.status_code == 200, found.text
    return found.json()


def test_inference_client_gets_vectors(gateway: GatewayProcess) -> None:
    client = InferenceClient(model=gateway.url)
    one = client.feature_extraction("the cat")
    assert one.shape == (1, 32)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    # It sends lists as they are, too.
    texts: Any = TEXTS
    many = client.feature_extraction(texts, normalize=False, truncate=True, dimensions=8)
    assert many.shape == (4, 8)
    assert np.linalg.norm(many[0]) != pytest.approx(1, abs=1e-2)
    prompted = client.feature_extraction("sat", prompt_name="query")
    np.testing.assert_allclose(
        prompted, client.feature_extraction("the cat sat"), atol=TOLERANCE, rtol=0
    )


def test_inference_client_labels_texts(gateway: GatewayProcess) -> None:
    client = InferenceClient(model=f"{gateway.url}/?model=classification")
    labels = client.text_classification("the cat")
    assert {each.label for each in labels} == set(LABELS)
    assert sum(each.score for each in labels) == pytest.approx(1, abs=1e-5)
    assert labels == sorted(labels, key=lambda each: -each.score)
    (best,) = client.text_classification("the cat", top_k=1)
    assert best == labels[0]
    raw = client.text_classification("the cat", function_to_apply="none")
    powers = np.exp([each.score for each in raw])
    assert powers / powers.sum() == pytest.approx([each.score for each in labels], abs=1e-5)


def test_sparse_vectors_of_a_batch_are_those_of_single_texts(gateway: GatewayProcess) -> None:
    many = answer(gateway, "/embed_sparse", {"inputs": TEXTS})
    for text, values in zip(TEXTS, many, strict=True):
        (alone,) = answer(gateway, "/embed_sparse", {"inputs": text})
        assert [each["index"] for each in values] == [each["index"] for each in alone]
        assert [each["value"] for each in values] == pytest.approx(
            [each["value"] for each in alone], abs=TOLERANCE
        )
        assert all(each["value"] > 0 for each in values)


def test_texts_are_ranked_as_they_score_alone(gateway: GatewayProcess) -> None:
    body: dict[str, Any] = {"query": "cats", "texts": TEXTS, "return_text": True}
    ranks = answer(gateway, "/rerank", body)
    assert [TEXTS[each["index"]] for each in ranks] == [each["text"] for each in ranks]
    scores = [each["score"] for each in ranks]
    assert scores == sorted(scores, reverse=True)
    for rank in ranks:
        (alone,) = answer(gateway, "/rerank", {"query": "cats", "texts": [rank["text"]]})
        assert alone == {"index": 0, "score": pytest.approx(rank["score"], abs=TOLERANCE)}
    raw = answer(gateway, "/rerank", {**body, "raw_scores": True})
    squashed = 1 / (1 + np.exp([-each["score"] for each in raw]))
    assert squashed == pytest.approx(scores, abs=TOLERANCE)


def test_truncation_is_the_callers_choice(gateway: GatewayProcess) -> None:
    long = "the cat sat " * 10
    usual = answer(gateway, "/embed", {"inputs": long})
    assert usual == answer(gateway, "/embed", {"inputs": long, "truncate": True})
    left = {"inputs": long + "tea and salt", "truncate": True, "truncation_direction": "Left"}
    assert usual != answer(gateway, "/embed", left)
    refused = post(gateway, "/embed", {"inputs": long, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")
    assert "32 tokens are more than max_length = 20" in refused.json()["error"]


def test_similarity_is_the_cosine_of_the_vectors(gateway: GatewayProcess) -> None:
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    found = answer(gateway, "/similarity", {"inputs": inputs})
    vectors = np.array(answer(gateway, "/embed", {"inputs": TEXTS}))
    assert found == pytest.approx(list(vectors @ vectors[0]), abs=1e-5)
    prompted = {"inputs": inputs, "parameters": {"prompt_name": "query", "truncate": True}}
    assert answer(gateway, "/similarity", prompted) != found


def test_info_has_the_limits_of_the_settings(gateway: GatewayProcess, models: Models) -> None:
    info = gateway.get("/info").json()
    # Where its folder lies is nobody's business.
    assert info["model_id"] == Path(models["embedding"]["model"]).name
    assert info["model_type"] == {"embedding": {"pooling": "auto"}}
    limits = ("max_client_batch_size", "max_concurrent_requests", "max_input_length")
    assert [info[each] for each in limits] == [2048, 4096, 20]
    assert (info["auto_truncate"], info["model_dtype"], info["sha"]) == (True, "auto", None)
    for model, kind in (("classification", "classifier"), ("rerank", "reranker")):
        known = gateway.get(f"/info?model={model}").json()
        assert known["model_type"] == {kind: {"id2label": {}, "label2id": {}}}
        assert known["max_input_length"] == 0
    far = gateway.get("/info?model=far")
    assert (far.json()["max_input_length"], far.json()["auto_truncate"]) == (0, False)
    assert "/nowhere" not in far.text
    assert gateway.get("/info?model=generation").status_code == 424


@pytest.mark.parametrize(
    ("model", "body", "path"),
    [
        ("embedding", {"inputs": TEXTS}, "/embed"),
        ("bge", {"inputs": TEXTS}, "/embed"),
        ("multi_vector_embedding", {"inputs": TEXTS}, "/embed_all"),
        ("sparse_embedding", {"inputs": TEXTS}, "/embed_sparse"),
        ("classification", {"inputs": [["the cat"]]}, "/predict"),
        ("rerank", {"query": "cats", "texts": TEXTS}, "/rerank"),
    ],
)
def test_root_does_what_the_kind_of_model_does(
    gateway: GatewayProcess, model: str, body: dict[str, Any], path: str
) -> None:
    wanted = answer(gateway, path, body)
    assert answer(gateway, f"/?model={model}", body) == wanted
    assert answer(gateway, "/", {**body, "model": model}) == wanted


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "named"),
    [
        ("/embed", {"inputs": []}, 400, "Empty", "inputs"),
        ("/embed", {"inputs": ["a", ""]}, 400, "Empty", "item 1 of inputs"),
        ("/embed", {"inputs": ["a", 1]}, 422, "Validation", "item 1"),
        ("/embed", {"inputs": [30_000]}, 422, "Validation", "30000"),
        ("/embed", {}, 422, "Validation", "inputs"),
        ("/embed", ["a"], 422, "Validation", "no object of JSON"),
        ("/embed", {"inputs": ["a"] * 3000}, 413, "Validation", "max_items = 2048"),
        ("/embed", {"inputs": "a", "dimensions": 99}, 422, "Validation", "dimensions = 99"),
        ("/embed", {"inputs": "a", "prompt_name": "n" * 201}, 422, "Validation", "prompt_name"),
        (
            "/embed",
            {"inputs": "a", "prompt_name": "no"},
            422,
            "Validation",
            "there are document, query",
        ),
        ("/embed", {"inputs": "a", "model": "gpt"}, 404, "Validation", "'gpt'"),
        ("/embed", {"inputs": "a", "model": "rerank"}, 424, "Backend", "not embedding"),
        ("/embed_all", {"inputs": ["a " * 30_000] * 2}, 413, "Validation", "120000 characters"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "Validation", "item 1"),
        ("/predict", {"inputs": ["a", ""]}, 422, "Validation", "text_pair"),
        ("/rerank", {"query": "a", "texts": []}, 400, "Empty", "texts"),
        ("/rerank", {"query": "", "texts": ["a"]}, 422, "Validation", "query"),
        ("/similarity", {"inputs": "a"}, 422, "Validation", "inputs"),
        ("/", {"inputs": 1}, 422, "Validation", "inputs"),
        ("/", {"model": "generation", "inputs": "a"}, 424, "Backend", "of kind generation"),
    ],
)
def test_bad_request_says_what_is_wrong(
    gateway: GatewayProcess, path: str, body: Any, status: int, kind: str, named: str
) -> None:
    found = post(gateway, path, body)
    assert (found.status_code, found.json()["error_type"]) == (status, kind)
    assert named in found.json()["error"]
