"""Requests for a model that no worker serves: refused at once, and never where one may be there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import queue_length, wait_for
from support.patience import patient

#: How long a queue may be without a worker in these tests, in seconds.
GRACE_S = 2

GRACE = {"worker_grace_s": GRACE_S}

#: A call that waits in vain takes this long, in seconds: far longer than a refusal on any machine.
LONG_S = patient(60)

#: A worker that answers to the name of the model, and starts in a second.
SERVING = ("apps.slow_vectors", "-Q", "embed")
VECTORS = {"NAME": "embed", "PAUSE_S": "0", "TRACE": os.devnull}

#: A worker of it is another than those with leases; a task stands in the place of the model.
STOCK = {"apps.uninstalled.shout": {**EMBED["embed"], "queue": "celery"}}


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway) -> GatewayProcess:
    """One that may have seen workers before."""
    return start_gateway(gateway=GRACE)


def embed(gateway: GatewayProcess, **headers: str) -> httpx2.Response:
    body = {"input": "a", "model": "embed"}
    return gateway.post("/v1/embeddings", body, headers=headers, timeout=LONG_S)


def wait_refused(gateway: GatewayProcess) -> httpx2.Response:
    # One that comes too early waits for its results.
    soon = {"x-request-timeout": "0.5"}
    wait_for(lambda: embed(gateway, **soon).status_code == 503, "it is refused", LONG_S)
    return embed(gateway)


def stays(status: int, ask: Callable[[], int]) -> None:
    """A look a second follows the workers meanwhile, and the grace is over twice."""
    until_s = time.monotonic() + 2 * GRACE_S
    while time.monotonic() < until_s:
        assert ask() == status
        time.sleep(0.1)  # Without, the calls keep both processors busy.


def test_model_without_worker_is_refused_at_once_until_one_starts(
    start_gateway: StartGateway, start_worker: StartWorker, redis_url: str
) -> None:
    gateway = start_gateway(gateway=GRACE)
    refused = wait_refused(gateway)
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("no_worker", "server_error")
    assert "model 'embed': no worker has consumed its queue 'embed' for 2 s" in error["message"]
    assert "start one: celery -A batchery.app worker -Q embed" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    sent = queue_length(redis_url, "embed")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": "a"},
        "/embed": {"inputs": "a"},
        "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
        "/page/try": {"model": "embed", "item": "a"},
    }
    for path, body in bodies.items():
        assert gateway.post(path, body).status_code == 503, path
    # Nothing was sent for them.
    assert queue_length(redis_url, "embed") == sent
    worker = start_worker(*SERVING, env=VECTORS)
    wait_for(lambda: embed(gateway).status_code == 200, "it is served", LONG_S)
    stays(200, lambda: embed(gateway).status_code)
    worker.stop()
    assert "no worker" in wait_refused(gateway).json()["error"]["message"]


def test_model_that_has_just_answered_is_there(
    start_gateway: StartGateway, start_worker: StartWorker
) -> None:
    """The call that waits for its worker is answered before the next look."""
    gateway = start_gateway(gateway=GRACE)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(embed, gateway)
        wait_refused(gateway)
        start_worker(*SERVING, env=VECTORS)
        assert waiting.result().status_code == 200
        assert embed(gateway).status_code == 200


def test_worker_of_other_queues_serves_no_model(
    gateway: GatewayProcess, start_worker: StartWorker, redis_url: str
) -> None:
    def control(*words: str) -> None:
        # Not this process, whose connection would look like that of a worker for a while.
        command = ["celery", "-A", "batchery.app", "control", "--timeout", str(patient(2)), *words]
        env = {**os.environ, "BATCHERY_REDIS_URL": redis_url, "BATCHERY_MODELS": json.dumps(EMBED)}
        # It is given again where no worker has answered in time.
        wait_for(
            lambda: subprocess.call([sys.executable, "-m", *command], env=env) == 0,
            f"an answer to {words}",
            LONG_S,
        )

    start_worker("apps.slow_vectors", "-Q", "other", env=VECTORS)
    wait_refused(gateway)
    control("add_consumer", "embed")
    wait_for(lambda: embed(gateway).status_code == 200, "it is served", LONG_S)
    control("cancel_consumer", "embed")
    wait_refused(gateway)


def test_worker_with_celerys_transport_is_never_taken_for_absent(
    start_gateway: StartGateway, start_worker: StartWorker
) -> None:
    gateway = start_gateway(models=STOCK, gateway=GRACE)

    def answer() -> int:
        body = {"model": "apps.uninstalled.shout", "item": "a"}
        return gateway.post("/page/try", body, timeout=LONG_S).status_code

    time.sleep(2 * GRACE_S)
    wait_for(lambda: answer() == 503, "it is refused", LONG_S)
    start_worker("apps.uninstalled", "-P", "solo", "--without-heartbeat")
    wait_for(lambda: answer() == 200, "it is served", LONG_S)
    stays(200, answer)


def test_those_who_await_answers_of_workers_are_no_workers(gateway: GatewayProcess) -> None:
    for _ in range(2):
        # The survey waits for answers as Celery's own workers wait for jobs.
        assert gateway.get("/status").json()["workers"] == 0
        wait_refused(gateway)


def test_tasks_that_need_no_answer_still_queue(start_gateway: StartGateway, redis_url: str) -> None:
    gateway = start_gateway(gateway={**GRACE, "tasks": ["embed"]})
    wait_refused(gateway)
    sent = queue_length(redis_url, "embed")
    assert gateway.post("/tasks/embed", {"item": "a", "wait_s": 0}).status_code == 202
    assert queue_length(redis_url, "embed") == sent + 1
