"""The routes for text classification: labels, limits, streams, counters, a real classifier."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from celery import Celery

from conftest import StartGateway, StartWorker
from support.gateway import GatewayProcess, metric_samples
from support.harness import Worker, queue_length, unsettled, wait_for
from support.tiny_models import save_model

LABELS = ("NEGATIVE", "POSITIVE")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A classifier, and the same one where long texts are refused."""
    folder = tmp_path_factory.mktemp("classifier")
    save_model(folder, "bert", LABELS)
    mood = {"kind": "classification", "model": str(folder), "max_length": 64}
    strict = {**mood, "overflow": "refuse", "max_length": 8}
    return {"mood": mood, "strict": strict}


@pytest.fixture(scope="module")
def model_worker(
    start_module_worker: StartWorker, models: dict[str, Any], client: Celery
) -> Worker:
    """Serves both."""
    environment = {"BATCHERY_MODELS": json.dumps(models)}
    return start_module_worker("batchery.app", env=environment).wait_answers(client)


@pytest.fixture(scope="module")
def gateway(
    start_gateway: StartGateway, model_worker: Worker, models: dict[str, Any]
) -> GatewayProcess:
    """Serves anybody on this machine, in two processes."""
    return start_gateway("--processes", "2", models=models)


def post(gateway: GatewayProcess, path: str = "/process-batch", **body: Any) -> httpx2.Response:
    return gateway.post(path, body)


def test_the_seeds_line_of_curl(gateway: GatewayProcess) -> None:
    line = """
        curl -X POST https://HOST/process-batch -H "Content-Type: application/json" -d '{ "texts":
        ["I love this product!", "This is terrible quality.", "Amazing service and support!"],
        "batch_size": 8 }'
    """
    command = " ".join(line.replace("https://HOST", gateway.url).split())
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    answer = json.loads(done.stdout)
    assert [result["text"] for result in answer["results"]] == [
        "I love this product!",
        "This is terrible quality.",
        "Amazing service and support!",
    ]
    assert [result["processing_order"] for result in answer["results"]] == [0, 1, 2]
    assert {result["sentiment"] for result in answer["results"]} <= set(LABELS)
    assert all(0.5 <= result["confidence"] <= 1 for result in answer["results"])
    # Words and signs, and two special tokens.
    assert [result["token_count"] for result in answer["results"]] == [7, 7, 7]
    assert answer["total_texts"] == 3
    assert answer["processing_time"] >= answer["average_time_per_text"] > 0
    assert answer["batch_info"] == {
        "requested_batch_size": 8,
        "actual_batches_used": 1,
        "max_length": 64,
        "device": "cpu",
    }
    metrics = answer["performance_metrics"]
    assert metrics.pop("texts_per_second") > 0
    assert metrics == {"gpu_memory_used": None, "total_tokens_processed": 21}


def test_texts_are_stripped_and_long_ones_cut(gateway: GatewayProcess) -> None:
    long = "the cat " * 100
    answer = post(gateway, texts=["  the cat\n", long], max_length=50).json()
    assert (answer["results"][1]["token_count"], answer["batch_info"]["max_length"]) == (50, 50)
    answer = post(gateway, texts=["  the cat\n", long]).json()
    assert answer["batch_info"]["max_length"] == 64
    results = answer["results"]
    assert (results[0]["text"], results[0]["truncated"]) == ("the cat", False)
    assert (results[1]["token_count"], results[1]["truncated"]) == (64, True)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["a"] * 101}, "texts"),
        ({"texts": ["a", " \n\t "]}, "texts.1"),
        ({"texts": ["a" * 10_001]}, "texts.0"),
        ({"texts": ["a"], "max_length": 49}, "max_length"),
        ({"texts": ["a"], "batch_size": 33}, "batch_size"),
        ({"texts": ["a"], "batch_size": 1.5}, "batch_size"),
    ],
)
def test_limit_is_named(gateway: GatewayProcess, body: dict[str, Any], field: str) -> None:
    for path in ("/process-batch", "/process-batch-stream"):
        answer = post(gateway, path, **body)
        assert answer.status_code == 422
        assert answer.json()["detail"].startswith(f"{field}: ")


def test_limits_themselves_are_allowed(gateway: GatewayProcess) -> None:
    texts = [f"  {'a' * 10_000}  ", *["the dog"] * 99]
    answer = post(gateway, texts=texts, batch_size=32, max_length=1024).json()
    assert (answer["total_texts"], len(answer["results"])) == (100, 100)
    assert 1 <= answer["batch_info"]["actual_batches_used"] <= 4


def read_stream(gateway: GatewayProcess, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream as they come."""
    with gateway.stream("/process-batch-stream", body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_stream_tells_of_each_batch(gateway: GatewayProcess) -> None:
    texts = [f"the cat number {number}" for number in range(5)]
    events = list(read_stream(gateway, {"texts": texts, "batch_size": 2}))
    steps = [event["status"] for event in events]
    assert steps == ["started", *["processing_batch", "batch_complete"] * 3, "completed"]
    started = {"total_texts": 5, "batch_size": 2, "estimated_batches": 3}
    assert events[0] == {"status": "started", **started}
    begun = [event for event in events if event["status"] == "processing_batch"]
    assert [tuple(each.values())[1:] for each in begun] == [(1, 2, 0.0), (2, 2, 0.4), (3, 1, 0.8)]
    done = [event for event in events if event["status"] == "batch_complete"]
    partial = [result for each in done for result in each["partial_results"]]
    assert events[-1]["final_results"] == partial
    assert [result["text"] for result in partial] == texts
    assert [result["processing_order"] for result in partial] == list(range(5))
    assert all(each["batch_time"] >= 0 for each in done)
    assert events[-1]["total_time"] > events[-1]["average_time_per_text"] > 0


def test_error_in_the_middle_is_an_event(gateway: GatewayProcess) -> None:
    texts = ["cat", " ".join(["cat"] * 9), "dog"]
    body = {"texts": texts, "batch_size": 1, "model": "strict"}
    events = list(read_stream(gateway, body))
    assert [event["status"] for event in events] == [
        "started",
        "processing_batch",
        "batch_complete",
        "processing_batch",
        "error",
    ]
    assert (events[-1]["batch_number"], events[-1]["kind"]) == (2, "invalid")
    assert "item 1: text: 11 tokens are more than max_length = 8" in events[-1]["detail"]
    body = {"texts": ["a", "b", "c", texts[1]], "batch_size": 2, "model": "strict"}
    *_, error = read_stream(gateway, body)
    assert error["detail"].startswith("item 3: text: 11 tokens")


def test_caller_who_hangs_up_in_the_middle_revokes_the_rest(
    start_gateway: StartGateway,
    model_worker: Worker,
    models: dict[str, Any],
    client: Celery,
    redis_url: str,
    store: Any,
) -> None:
    # The worker takes from this queue later.
    gateway = start_gateway(models={"mood": {**models["mood"], "queue": "later"}})
    stream = read_stream(gateway, {"texts": ["cat", "dog"], "batch_size": 1})
    assert next(stream)["status"] == "started"
    # It came before any batch was done.
    assert next(stream)["status"] == "processing_batch"
    wait_for(lambda: queue_length(redis_url, "later") == 2, "both batches sent")
    ids = [json.loads(raw)["headers"]["id"] for raw in store.lrange("later", 0, -1)]
    stream.close()  # type: ignore[attr-defined]

    def revoked() -> bool:
        lines = re.findall(r"flagged as revoked: (.+)", model_worker.log)
        return any(all(each in line for each in ids) for line in lines)

    wait_for(revoked, "jobs revoked at once")
    assert "never retrieved" not in gateway.log
    client.control.add_consumer("later", destination=[model_worker.name])
    wait_for(lambda: queue_length(redis_url, "later") + unsettled(redis_url) == 0, "jobs gone")


def test_counters_are_those_of_all_processes(
    gateway: GatewayProcess, start_gateway: StartGateway, models: dict[str, Any]
) -> None:
    def stats(of: GatewayProcess) -> dict[str, Any]:
        answer: dict[str, Any] = of.get("/batch-stats").json()
        return answer

    other = start_gateway(models=models)
    before = stats(gateway)
    for _ in range(4):
        assert post(gateway, texts=["a", "b", "c"]).status_code == 200
    list(read_stream(other, {"texts": ["a", "b"]}))
    # A worker that is late for one survey is in the next.
    after = wait_for(lambda: (found := stats(other))["model_loaded"] and found, "the model")
    assert after["total_requests"] - before["total_requests"] == 5
    assert after["total_texts_processed"] - before["total_texts_processed"] == 14
    assert after["peak_batch_size"] >= 3
    assert 0 < after["average_batch_time"] < 60
    assert (after["device"], after["model_loaded"]) == ("cpu", True)
    assert (after["current_gpu_memory"], after["max_gpu_memory"]) == (None, None)
    # As Prometheus counts them.
    counted = metric_samples(other)["batchery_gateway_items_total", (("model", "mood"),)]
    assert counted == 2
