"""Vectors on their way to every kind of client: base64 for ours, lists for all others."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from celery import Celery

from batchery import Embedding, to_numpy
from batchery_producer import AsyncClient, Client, submit_file
from conftest import StartGateway, StartWorker
from support.bulk_runs import read_rows
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, queue_length, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)

#: `kept` has a cache, so equal texts of a batch have equal numbers to the last bit.
MODELS = {**EMBED, "kept": {**EMBED["embed"], "cache": True}}

TEXT = "Each caller its own vector."

#: What our clients say of themselves.
HEADERS = {"batchery": {"v": 1, "vectors": "float32"}}


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, client: Celery) -> Worker:
    env = {"BATCHERY_MODELS": json.dumps(MODELS)}
    return start_module_worker("batchery.app", env=env).wait_answers(client)


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, worker: Worker) -> GatewayProcess:
    return start_gateway(models=MODELS)


def fetch(client: Celery, *items: Any, **options: Any) -> dict[str, Any]:
    """What is stored of a job, as Celery reads it."""
    job = client.send_task("kept", items, queue="kept", **options)
    job.get(timeout=TIMEOUT_S)
    stored: dict[str, Any] = client.backend.get_task_meta(job.id)
    return stored


def call_all(
    client: Celery, redis_url: str, gateway: GatewayProcess, folder: Path
) -> dict[str, Callable[[], tuple[Any, str]]]:
    """Every way to the vector of the text: gives the vector, and the batch where that is known."""

    def stock() -> tuple[Any, str]:
        stored = fetch(client, TEXT)
        return stored["result"]["vector"], stored["batch"]["id"]

    def by_client(**options: Any) -> tuple[Any, str]:
        with Client(redis_url) as ours:
            (outcome,) = ours.task("kept").as_completed([TEXT], **options)
        assert outcome.batch is not None
        return outcome.value["vector"], outcome.batch.id

    def by_async_client(**options: Any) -> tuple[Any, str]:
        async def scene() -> Any:
            async with AsyncClient(redis_url) as ours:
                return await ours.task("kept").outcomes([TEXT], **options)

        (outcome,) = asyncio.run(scene())
        assert outcome.batch is not None
        return outcome.value["vector"], outcome.batch.id

    def by_submit(name: str) -> tuple[Any, str]:
        texts, output = folder / f"{name}.txt", folder / name
        texts.write_text(TEXT)
        output.unlink(missing_ok=True)
        submit_file(texts, "kept", output, app=client, timeout_s=TIMEOUT_S)
        (row,) = read_rows(output)
        return row["result"]["vector"], ""

    def by_gateway(encoding: str) -> tuple[Any, str]:
        body = {"model": "kept", "input": TEXT, "encoding_format": encoding}
        answer = gateway.post("/v1/embeddings", body).raise_for_status().json()
        return answer["data"][0]["embedding"], ""

    return {
        "stock": stock,
        "client": by_client,
        "client, several items": lambda: by_client(per_job=2),
        "client, base64": lambda: by_client(keeps_base64=True),
        "async client": by_async_client,
        "async client, base64": lambda: by_async_client(keeps_base64=True),
        "lines": lambda: by_submit("out.jsonl"),
        "table": lambda: by_submit("out.parquet"),
        "gateway": lambda: by_gateway("float"),
        "gateway, base64": lambda: by_gateway("base64"),
    }


def test_all_clients_share_a_batch_and_have_the_same_numbers(
    client: Celery, worker: Worker, redis_url: str, gateway: GatewayProcess, tmp_path: Path
) -> None:
    calls = call_all(client, redis_url, gateway, tmp_path)
    (device,) = worker.devices()
    # Computed, and then from the cache.
    for _ in range(2):
        with ThreadPoolExecutor(len(calls)) as threads:
            device.suspend()
            try:
                sent = {name: threads.submit(call) for name, call in calls.items()}
                wait_for(
                    lambda: queue_length(redis_url, "kept") == len(calls), "all sent", TIMEOUT_S
                )
            finally:
                device.resume()
            found = {name: each.result(TIMEOUT_S) for name, each in sent.items()}
        assert len({batch for _, batch in found.values() if batch}) == 1
        numbers = {to_numpy(vector).tobytes() for vector, _ in found.values()}
        assert len(numbers) == 1
        kinds = {name: type(vector) for name, (vector, _) in found.items()}
        assert kinds == {name: str if "base64" in name else list for name in calls}
        # Lines have as few digits as what Celery's clients read.
        assert found["lines"][0] == found["table"][0] == found["stock"][0]


def test_a_result_says_that_its_vectors_are_packed(client: Celery, worker: Worker) -> None:
    stock, ours = fetch(client, TEXT), fetch(client, TEXT, headers=HEADERS)
    assert "vectors" not in stock
    assert ours["vectors"] == "float32"
    assert isinstance(ours["result"]["vector"], str)
    # Whoever else reads it, reads it as what `encoding="base64"` gives.
    found = Embedding.model_validate(ours["result"])
    assert (found.to_numpy() == to_numpy(stock["result"])).all()


def test_items_of_a_job_that_fail_and_jobs_with_callbacks_are_as_ever(
    client: Celery, worker: Worker, redis_url: str
) -> None:
    with Client(redis_url) as ours:
        task = ours.task("embed")
        good, bad, last = task.as_completed(["one", "", "two"], per_job=3, ordered=True)
        assert bad.error is not None
        for outcome in (good, last):
            assert {type(each) for each in outcome.value["vector"]} == {float}
        # The caller asked for a string, and gets one.
        (text,) = task.map(["one"], keywords={"encoding": "base64"})
        assert np.allclose(to_numpy(text), to_numpy(good.value), atol=1e-6)
    # Celery's tracer has a callback to send.
    stored = fetch(client, TEXT, headers=HEADERS, link=client.signature("nobody", queue="nobody"))
    assert "vectors" not in stored
    assert len(stored["result"]["vector"]) == 384
