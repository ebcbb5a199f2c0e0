"""Clients of Cohere, Jina and LangChain, unmodified, in front of a real worker."""

import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import openai
import pytest
import tiktoken
from langchain_openai import OpenAIEmbeddings

from conftest import StartGateway, StartWorker
from support.gateway import GatewayProcess
from support.tiny_models import save_model, write_json

QUERY = "what do cats do"

DOCUMENTS = ["the cat sat on the mat", "a dog barked", "rain falls on green hills", "tea"]

Models = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A reranker and an embedding model."""
    folder: Path = tmp_path_factory.mktemp("models")
    save_model(folder / "rerank", "bert", labels=("relevance",))
    save_model(folder / "embed", "bert")
    prompted = folder / "prompted"
    save_model(prompted, "bert")
    prompts = {"prompts": {"query": "the cat ", "clustering": "a dog "}}
    write_json(prompted, "config_sentence_transformers.json", prompts)
    pooling = {"pooling_mode": "mean", "embedding_dimension": 32}
    write_json(prompted, "1_Pooling/config.json", pooling)
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules.items())
    ]
    write_json(prompted, "modules.json", listed)
    return {
        "rerank": {"kind": "rerank", "model": str(folder / "rerank"), "aliases": ["rerank-v3.5"]},
        "embed": {
            "kind": "embedding",
            "model": str(folder / "embed"),
            "aliases": ["text-embedding-3-small", str(folder / "embed")],
        },
        "prompted": {
            "kind": "embedding",
            "model": str(folder / "prompted"),
            "max_length": 8,
            "aliases": ["embed-v4.0"],
        },
    }


@pytest.fixture(scope="module")
def gateway(
    models: Models, start_module_worker: StartWorker, start_gateway: StartGateway
) -> GatewayProcess:
    """A gateway, and a worker with those models."""
    start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    return start_gateway(models=models)


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[cohere.Client]:
    """Cohere's client of the first version."""
    with cohere.Client(api_key="none", base_url=gateway.url) as made:
        yield made


@pytest.fixture
def client_v2(gateway: GatewayProcess) -> Iterator[cohere.ClientV2]:
    """Cohere's client of the second version."""
    with cohere.ClientV2(api_key="none", base_url=gateway.url) as made:
        yield made


def test_cohere_ranks_documents(client_v2: cohere.ClientV2) -> None:
    answer = client_v2.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS)
    assert sorted(each.index for each in answer.results) == [0, 1, 2, 3]
    scores = [each.relevance_score for each in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert answer.id
    assert answer.meta is not None
    assert answer.meta.billed_units is not None
    assert answer.meta.billed_units.search_units == 1
    assert answer.meta.tokens is not None
    assert answer.meta.tokens.input_tokens
    for each in answer.results:
        alone = client_v2.rerank(
            model="rerank", query=QUERY, documents=[DOCUMENTS[each.index]], max_tokens_per_doc=4096
        )
        assert alone.results[0].relevance_score == pytest.approx(each.relevance_score, abs=1e-5)
    best = client_v2.rerank(model="rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [each.index for each in best.results] == [each.index for each in answer.results[:2]]


def test_cohere_ranks_objects(client: cohere.Client) -> None:
    documents = [{"text": text, "id": str(number)} for number, text in enumerate(DOCUMENTS)]
    answer = client.rerank(query=QUERY, documents=documents, return_documents=True)
    for each in answer.results:
        assert each.document is not None
        assert each.document.model_dump() == documents[each.index]
    plain = client.rerank(model="rerank", query=QUERY, documents=DOCUMENTS)
    assert [each.index for each in plain.results] == [each.index for each in answer.results]
    assert plain.results[0].document is None


def test_jina_finds_its_fields(gateway: GatewayProcess) -> None:
    body = {"model": "rerank", "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    answer = gateway.post("/v1/rerank", {**body, "return_documents": True}).json()
    assert answer["model"] == "rerank"
    assert answer["usage"]["total_tokens"] > 10
    assert len(answer["results"]) == 3
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert 0 < each["relevance_score"] < 1


def test_langchain_by_default_is_told_that_its_token_ids_are_another_tokenizer_s(
    gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # OpenAI's own encoding would be downloaded; here a byte is a token, so all ids are the model's.
    encoding = tiktoken.Encoding(
        "cl100k_base",
        pat_str=".",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={},
    )
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", encoding)
    made = OpenAIEmbeddings(  # type: ignore[call-arg]
        model="text-embedding-3-small", base_url=f"{gateway.url}/v1", api_key="none"
    )
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        made.embed_documents(["cat", "dog"])
    assert caught.value.param == "input"
    assert "under its own name" in caught.value.message


def test_token_ids_go_with_the_model_s_own_names(gateway: GatewayProcess, models: Models) -> None:
    hub_id = models["embed"]["model"]
    for name in ("embed", hub_id, None):
        answer = gateway.post("/v1/embeddings", {"model": name, "input": [[5, 6], [7]]})
        assert len(answer.raise_for_status().json()["data"]) == 2
    for ids in ([5, 6], [[5, 6]], ["text", [5]]):
        answer = gateway.post("/v1/embeddings", {"model": "text-embedding-3-small", "input": ids})
        assert answer.status_code == 400
        assert "input: has token ids" in answer.json()["error"]["message"]


def vectors_of(gateway: GatewayProcess, given: Any, **fields: Any) -> list[Any]:
    answer = gateway.post("/v1/embeddings", {"model": "prompted", "input": given, **fields})
    return [each["embedding"] for each in answer.raise_for_status().json()["data"]]


def test_options_of_other_vendors_are_honoured(gateway: GatewayProcess) -> None:
    close = partial(pytest.approx, abs=1e-5)
    plain, query, clustering, long = vectors_of(
        gateway, ["tea", "the cat tea", "a dog tea", "tea " * 20]
    )
    jina = {"normalized": True, "late_chunking": False, "embedding_type": "float"}
    assert vectors_of(gateway, ["tea"], task="retrieval.passage", **jina)[0] == close(plain)
    assert vectors_of(gateway, "tea", task="retrieval.query", **jina)[0] == close(query)
    assert vectors_of(gateway, "tea", task="clustering")[0] == close(clustering)
    (packed,) = vectors_of(gateway, ["tea"], embedding_type="base64")
    assert np.frombuffer(base64.b64decode(packed), "<f4") == close(plain)
    # As Voyage's client sends them.
    voyage = {"output_dtype": None, "output_dimension": 8, "truncation": True}
    (short,) = vectors_of(gateway, ["tea"], input_type="document", **voyage)
    assert len(short) == 8
    assert short == close(np.array(plain[:8]) / np.linalg.norm(plain[:8]))
    assert vectors_of(gateway, "tea", input_type="query")[0] == close(query)
    (unscaled,) = vectors_of(gateway, "tea", normalized=False)
    assert np.linalg.norm(unscaled) != pytest.approx(1, abs=1e-3)
    assert vectors_of(gateway, "tea " * 20, truncation=True)[0] == close(long)
    # A model without prompts has the same vectors whatever texts are for.
    answer = gateway.post("/v1/embeddings", {"model": "embed", "input": "a", "input_type": "query"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"embedding_type": "binary"}, "embedding_type: Input should be 'float' or 'base64'"),
        ({"output_dtype": "int8"}, "output_dtype: Input should be 'float'"),
        ({"late_chunking": True}, "late_chunking: expected null or false, as it is not"),
        ({"task": "separation"}, "keyword prompt = 'separation': there are clustering, document,"),
        ({"input": "tea " * 20, "truncation": False}, "more than max_length = 8"),
    ],
)
def test_options_that_are_not_served_are_refused_by_name(
    gateway: GatewayProcess, fields: dict[str, Any], text: str
) -> None:
    answer = gateway.post("/v1/embeddings", {"model": "prompted", "input": "tea", **fields})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]
