"""Models behind a real worker: built-in ones by settings alone, and an app's own."""

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from celery import Celery

from apps import models
from batchery import InvalidItem, to_numpy
from conftest import StartWorker
from support.harness import Worker, queue_length, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)

LABELS = ["calm", "cross", "glad"]


@pytest.fixture(scope="module")
def classifier_path(tmp_path_factory: pytest.TempPathFactory, minilm_path: Path) -> Path:
    """A small BERT classifier with random weights and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker(
    start_module_worker: StartWorker,
    tmp_path_factory: pytest.TempPathFactory,
    model_toml: str,
    classifier_path: Path,
    redis_url: str,
) -> Worker:
    folder = tmp_path_factory.mktemp("settings")
    classifier = f'kind = "classification"\nmodel = "{classifier_path}"\n'
    cached = f'{classifier}forward = "padded"\ncache = true\n'
    (folder / "batchery.toml").write_text(
        f"{model_toml}[models.mood]\n{classifier}"
        f"[models.kept]\n{cached}[models.spread]\n{cached}multi_label = true\n"
    )
    models.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.models", "-E", cwd=folder)


def send(client: Celery, task: str, item: Any, **keywords: Any) -> Any:
    return client.send_task(task, [item], keywords, queue=task)


def test_a_client_without_batchery_gets_the_vector_that_transformers_computes(
    worker: Worker, redis_url: str, minilm_path: Path
) -> None:
    text = "Batched inference, one padded forward pass, each caller its own vector."
    program = textwrap.dedent(
        f"""
        import json, sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0].startswith("batchery"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Block())
        from celery import Celery
        app = Celery(broker=sys.argv[1], backend=sys.argv[1])
        job = app.send_task("embed", [sys.argv[2]], queue="embed")
        print(json.dumps(job.get(timeout={TIMEOUT_S})))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, redis_url, text], capture_output=True, text=True, check=True
    )
    result = json.loads(done.stdout)
    assert cosine(to_numpy(result), direct_embedding(minilm_path, text)) > 0.9999


def test_200_concurrent_callers_share_batches_and_get_their_own_vectors(
    worker: Worker, client: Celery, minilm_path: Path, redis_url: str
) -> None:
    texts = [f"{'word ' * (number % 40)}number {number}" for number in range(200)]
    alone = {text: direct_embedding(minilm_path, text) for text in texts[::40]}
    before = collect_batches(client, worker)

    def call(text: str) -> Any:
        return send(client, "embed", text).get(timeout=TIMEOUT_S)

    (device,) = worker.devices()
    with ThreadPoolExecutor(200) as threads:
        device.suspend()
        try:
            calls = threads.map(call, texts)
            wait_for(lambda: queue_length(redis_url, "embed") == 200, "all have called", TIMEOUT_S)
        finally:
            device.resume()
        results = list(calls)
    after = collect_batches(client, worker)
    mean = (after["items"] - before["items"]) / (after["batches"] - before["batches"])
    assert mean > 8
    vectors = [to_numpy(result) for result in results]
    for text, vector in alone.items():
        assert cosine(vectors[texts.index(text)], vector) > 0.9999
    similar = np.stack(vectors) @ np.stack(vectors).T
    assert (similar.argmax(axis=1) == np.arange(200)).all()


def test_two_models_answer_from_one_worker(worker: Worker, client: Celery) -> None:
    jobs = [
        (send(client, "embed", f"text {number}"), send(client, "mood", f"text {number}"))
        for number in range(20)
    ]
    for embedding, mood in jobs:
        assert len(embedding.get(timeout=TIMEOUT_S)["vector"]) == 384
        assert mood.get(timeout=TIMEOUT_S)["label"] in LABELS


def cache_of(client: Celery, worker: Worker, name: str) -> dict[str, Any]:
    """What the worker says of a model's cache; empty before it has said anything."""
    found: dict[str, Any] = collect_batches(client, worker)["caches"].get(name, {})
    return found


def test_equal_texts_are_computed_once_and_never_by_another_model(
    worker: Worker, client: Celery
) -> None:
    texts = [f"text {number % 10}" for number in range(100)]
    kept = [send(client, "kept", text) for text in texts]
    results = [job.get(timeout=TIMEOUT_S) for job in kept]
    # To the last digit.
    assert results == results[:10] * 10
    wait_for(lambda: cache_of(client, worker, "kept").get("items") == 100, "all are counted")
    found = cache_of(client, worker, "kept")
    assert (found["computed"], found["hit_rate"]) == (10, 0.9)

    # The same texts of a model that keeps nothing, of one that differs in a setting, and with
    # another keyword.
    others = [[send(client, name, text) for text in texts[:10]] for name in ("mood", "spread")]
    plain, spread = ([job.get(timeout=TIMEOUT_S) for job in jobs] for jobs in others)
    for result, other in zip(results, plain, strict=False):
        assert result["label"] == other["label"]
        assert abs(result["score"] - other["score"]) < 1e-5
    assert results[:10] != spread
    scores = [send(client, "kept", text, top_k=2) for text in texts[:10]]
    assert all(len(job.get(timeout=TIMEOUT_S)["scores"]) == 2 for job in scores)
    wait_for(lambda: cache_of(client, worker, "kept").get("items") == 110, "all are counted")
    assert cache_of(client, worker, "kept")["computed"] == 20
    assert cache_of(client, worker, "spread")["computed"] == 10
    assert not cache_of(client, worker, "mood")


def test_keywords_reach_the_model(worker: Worker, client: Celery) -> None:
    short = send(client, "embed", "text", dimensions=64, encoding="base64").get(timeout=TIMEOUT_S)
    assert to_numpy(short).shape == (64,)
    scores = send(client, "mood", "text", top_k=2).get(timeout=TIMEOUT_S)["scores"]
    assert len(scores) == 2


@pytest.mark.parametrize("bad", ["", 7, None, ["a list"]])
def test_a_bad_text_fails_alone_and_names_the_field(
    worker: Worker, client: Celery, bad: Any
) -> None:
    items = ["good", bad, "also good"]
    jobs = [send(client, "embed", item) for item in items]
    assert jobs[0].get(timeout=TIMEOUT_S)["tokens"] == 3
    with pytest.raises(InvalidItem, match=r"text|token ids"):
        jobs[1].get(timeout=TIMEOUT_S)
    assert jobs[2].get(timeout=TIMEOUT_S)["tokens"] == 4


def test_an_app_has_models_and_ordinary_tasks_side_by_side(worker: Worker) -> None:
    count = models.counter.delay("three words here")
    double = models.double.delay(4)
    assert count.get(timeout=TIMEOUT_S)["words"] == 30
    assert double.get(timeout=TIMEOUT_S) == 8


def test_a_model_gets_micro_batches_within_its_token_budget(worker: Worker) -> None:
    jobs = models.counter.submit_many("word " * (1 + number % 9) for number in range(100))
    results = jobs.get(timeout=TIMEOUT_S)
    for number, result in enumerate(results):
        assert result["words"] == 10 * (1 + number % 9)
        assert result["loads"] == 1
        assert max(result["widths"]) * len(result["widths"]) <= 20


def test_a_model_that_raises_fails_only_the_culprit(worker: Worker) -> None:
    jobs = models.counter.submit_many(["a b", "c boom", "d e"], {"fail": "boom"})
    first, culprit, last = (jobs[number] for number in range(3))
    assert first.get(timeout=TIMEOUT_S)["words"] == 20
    with pytest.raises(ArithmeticError, match="boom"):
        culprit.get(timeout=TIMEOUT_S)
    assert last.get(timeout=TIMEOUT_S)["words"] == 20


def test_a_keyword_that_the_model_does_not_know_fails_with_its_name(worker: Worker) -> None:
    with pytest.raises(TypeError, match="colour"):
        models.counter.delay("a", colour="red").get(timeout=TIMEOUT_S)


def direct_embedding(folder: Path, text: str) -> "np.ndarray[Any, Any]":
    """What a plain transformers program computes: mean of the token vectors, length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector: np.ndarray[Any, Any] = hidden.mean(dim=0).numpy()
    vector /= np.linalg.norm(vector)
    return vector


def cosine(left: "np.ndarray[Any, Any]", right: "np.ndarray[Any, Any]") -> float:
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


def collect_batches(client: Celery, worker: Worker) -> dict[str, Any]:
    batches: dict[str, Any] = worker.inspect(client, "stats")["pool"]["batches"]
    return batches


def test_out_of_memory_fails_no_job_and_teaches_the_budget(worker: Worker) -> None:
    # As one message, so that they surely share a batch.
    texts, header = ["five words are in it"] * 64, {"v": 1, "n": 64}
    for _ in range(4):
        job = models.narrow.apply_async((texts,), headers={"batchery": header})
        assert [each["ok"]["words"] for each in job.get(timeout=TIMEOUT_S)] == [5] * 64

    def learned() -> Any:
        (device,) = worker.inspect(models.app, "stats")["pool"]["devices"].values()
        model = device["models"]["narrow"]
        return model["chosen_by"] == "memory" and model

    model = wait_for(learned, "the worker knows of the budget")
    assert 25 <= model["max_batch_tokens"] <= 55
    assert model["out_of_memory"] >= 1
    # A line for each new budget, however many passes failed.
    line = "narrow on cpu: no memory for forward passes of 400 tokens"
    wait_for(lambda: worker.has_logged(line, 1), "a line of the new budget")
    assert worker.log.count(line) == 1
