"""The gateway's metrics, of one process and of several; and surveys only while somebody asks."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from celery import Celery

from batchery.operations import exporter
from batchery_producer.gateway import health
from batchery_producer.gateway.health import Health, Monitor
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess, metric_samples
from support.harness import command_line, wait_ended, wait_for
from support.patience import patient


def requests(samples: Any, route: str, status: int) -> float:
    key = ("batchery_gateway_requests_total", (("route", route), ("status", str(status))))
    return float(samples.get(key, 0.0))


#: A model that no worker serves.
IDLE = {"embed": {**EMBED["embed"], "queue": "nobody"}}


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway) -> GatewayProcess:
    """Without a worker."""
    return start_gateway(models=IDLE)


def test_requests_are_counted_by_route_and_status(start_gateway: StartGateway) -> None:
    # One that nobody else has asked.
    gateway = start_gateway(models=IDLE)
    get = gateway.get
    for _ in range(3):
        assert get("/v1/models").status_code == 200
    assert get("/v1/models/embed").status_code == 200
    assert get("/v1/models/gpt-9").status_code == 404
    assert get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    for number in range(5):
        assert get(f"/nothing/{number}").status_code == 404
    headers = {"x-request-timeout": "0.2"}
    assert gateway.post("/v1/embeddings", {"input": "a"}, headers=headers).status_code == 504
    samples = metric_samples(gateway)
    assert requests(samples, "/v1/models", 200) == 3
    assert requests(samples, "/v1/models", 403) == 1
    assert requests(samples, "/v1/models/{name:path}", 200) == 1
    assert requests(samples, "/v1/models/{name:path}", 404) == 1
    assert requests(samples, "/v1/embeddings", 504) == 1
    assert requests(samples, "other", 404) == 5
    routes = {value for _, labels in samples for name, value in labels if name == "route"}
    assert "/nothing/1" not in routes
    where = (("route", "/v1/embeddings"),)
    assert samples["batchery_gateway_request_duration_seconds_count", where] == 1
    assert 0.2 <= samples["batchery_gateway_request_duration_seconds_sum", where] < patient(20)
    # That which asks for the metrics.
    assert samples["batchery_gateway_requests_in_flight", ()] == 1


def test_store_of_files_that_is_away_is_counted_as_it_is_answered(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    away.touch()
    gateway = start_gateway(models=IDLE, gateway={"files": str(away / "files")})
    answer = gateway.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert requests(metric_samples(gateway), "/v1/files", 503) == 1
    # A fault of the store, and none of the gateway.
    assert "Not a directory" in gateway.log
    assert "Traceback" not in gateway.log


def test_results_are_counted_by_model_and_failures_by_kind(
    gateway: GatewayProcess, start_gateway: StartGateway, start_module_worker: StartWorker
) -> None:
    # A task in the place of the model; its results have no tokens.
    start_module_worker("apps.shop", "-Q", "celery")
    served = start_gateway(
        models={"apps.shop.nasty": {**EMBED["embed"], "queue": "celery"}}, gateway={}
    )
    for item, status in (("a", 200), ("b", 200), ("raise", 500)):
        body = {"model": "apps.shop.nasty", "item": item}
        assert served.post("/page/try", body).status_code == status

    def surveyed() -> Any:
        samples = metric_samples(served)
        return samples if any("failures" in name for name, _ in samples) else None

    samples = wait_for(surveyed, "the worker has told of its failures")
    of_model = (("model", "apps.shop.nasty"),)
    assert samples["batchery_gateway_items_total", of_model] == 2
    assert samples["batchery_gateway_tokens_total", of_model] == 0
    assert samples["batchery_gateway_failed_items_total", (("kind", "failed"),)] == 1
    failures = {labels: value for (name, labels), value in samples.items() if "failures" in name}
    (labels,) = failures
    assert dict(labels)["error"] == "KeyError"
    assert failures[labels] == 1


def children(gateway: GatewayProcess) -> list[psutil.Process]:
    """The processes that serve."""
    found = psutil.Process(gateway.process.pid).children()
    return [each for each in found if "spawn_main" in command_line(each)]


def metrics_folder(gateway: GatewayProcess) -> Path:
    name = "PROMETHEUS_MULTIPROC_DIR"
    # A process that has just been started may show none yet.
    serving = wait_for(
        lambda: [each for each in children(gateway) if name in each.environ()], "a process serves"
    )
    return Path(serving[0].environ()[name])


def in_flight(gateway: GatewayProcess) -> float:
    return metric_samples(gateway)["batchery_gateway_requests_in_flight", ()]


def test_processes_are_counted_together_and_the_dead_have_nothing_in_flight(
    start_gateway: StartGateway,
) -> None:
    models = {"embed": {**EMBED["embed"], "queue": "nobody"}}
    gateway = start_gateway("--processes", "2", models=models)
    wait_for(lambda: len(children(gateway)) == 2, "two processes")
    # Each connection may come to another process.
    for _ in range(20):
        assert gateway.get("/v1/models").status_code == 200
    # The process of the last one may not have counted it when another one tells.
    wait_for(lambda: requests(metric_samples(gateway), "/v1/models", 200) == 20, "all are counted")

    def hang() -> None:
        with pytest.raises(httpx2.TransportError):
            gateway.post("/v1/embeddings", {"input": "a"})

    hanging = threading.Thread(target=hang)
    hanging.start()
    wait_for(lambda: in_flight(gateway) == 2, "a request in flight, and this one")
    for each in children(gateway):
        each.send_signal(signal.SIGKILL)
    hanging.join()

    def served() -> bool:
        try:
            return in_flight(gateway) == 1
        except httpx2.TransportError:
            return False

    wait_for(served, "others serve, and nothing is in flight", patient(60))
    # What was counted stays.
    assert requests(metric_samples(gateway), "/v1/models", 200) == 20
    folder = metrics_folder(gateway)
    assert folder.is_dir()
    assert gateway.stop() == 0
    assert not folder.exists()


def test_processes_and_their_folder_go_with_a_killed_parent(start_gateway: StartGateway) -> None:
    gateway = start_gateway("--processes", "2", gateway={"worker": True})
    folder, started = metrics_folder(gateway), children(gateway)
    gateway.process.kill()
    wait_ended(started)
    wait_for(lambda: not folder.exists(), "the folder is gone")


def test_workers_are_asked_once_for_all_readers_and_anew_after_a_pause(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a slow machine stands still.
    monkeypatch.setattr(exporter, "FRESH_S", patient(3.0))
    monkeypatch.setattr(health, "STALE_S", patient(3.0))
    monkeypatch.setattr(health, "ANSWER_TIMEOUT_S", 0.1)
    client = Celery("client", broker=redis_url, backend=redis_url, set_as_current=False)

    async def ask() -> None:
        watched = Monitor(client, {"empty"}, Health(client, (), 60))
        first = asyncio.create_task(watched.latest())
        await asyncio.sleep(0)
        # Who hangs up takes nothing from the others.
        first.cancel()
        looks = await asyncio.gather(*(watched.latest() for _ in range(100)))
        assert {id(look.now) for look in looks} == {id(looks[0].now)}
        assert looks[0].now is not None
        assert looks[0].now.queues["empty"] == 0
        while looks[0].age_s < health.STALE_S:
            await asyncio.sleep(0.01)
        # After a pause nobody gets what was true before it.
        assert (await watched.latest()).taken_s > looks[0].taken_s

    with client:
        asyncio.run(ask())
