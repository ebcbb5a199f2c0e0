"""A Redis that stands still: what watches the gateway is answered at once, and names no address."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from batchery_producer.gateway.callers import make_key
from support.gateway import GatewayProcess, metric_samples
from support.harness import wait_for
from support.own_redis import OwnRedis
from support.patience import patient

KEY, HASH = make_key()
HEADERS = {"authorization": f"Bearer {KEY}"}

#: Less than Prometheus waits, and than a single command to Redis may take: ten seconds each.
SOON_S = patient(3)

USER = "redisuser7"

#: A task that there is not.
TASK = f"/tasks/{'0' * 8}-0000-4000-8000-{'0' * 12}"


def add_user(own_redis: OwnRedis) -> None:
    with Redis.from_url(own_redis.url) as client:
        client.execute_command("ACL", "SETUSER", USER, "on", "nopass", "~*", "&*", "+@all")


@pytest.fixture
def keyed(own_redis: OwnRedis, tmp_path: Path) -> Iterator[GatewayProcess]:
    url = own_redis.url.replace("redis://", f"redis://{USER}:x@")
    add_user(own_redis)
    gateway = GatewayProcess(
        tmp_path, url, gateway={"keys": {"shop": {"hash": HASH}}, "tasks": ["apps.any"]}
    ).wait_ready()
    yield gateway
    gateway.kill()
    print(gateway.log)


def asked(gateway: GatewayProcess, path: str) -> httpx2.Response:
    """An answer that must come soon."""
    began_s = time.monotonic()
    answer = gateway.get(path, headers=HEADERS)
    assert time.monotonic() - began_s < SOON_S, path
    return answer


def is_up(gateway: GatewayProcess) -> float:
    return metric_samples(gateway, headers=HEADERS)["batchery_broker_up", ()]


def test_what_watches_is_answered_at_once_while_redis_hangs(
    keyed: GatewayProcess, own_redis: OwnRedis
) -> None:
    assert is_up(keyed) == 1
    assert asked(keyed, "/status").json()["problem"] is None
    with own_redis.hanging():
        # From the first moment on: the surveys of before go on for a while.
        for _ in range(3):
            assert asked(keyed, "/metrics").status_code == 200
            assert asked(keyed, "/status").status_code == 200
            asked(keyed, "/health")
        wait_for(lambda: is_up(keyed) == 0, "it is down")
        assert asked(keyed, "/status").json()["problem"] == "Redis does not answer"
        assert "batchery_gateway_requests_total" in asked(keyed, "/metrics").text
        wait_for(lambda: asked(keyed, "/health").status_code == 503, "unhealthy")
        # Nor do those wait who take other threads, or all of them.
        waiting = [
            threading.Thread(target=keyed.get, args=("/v1/files",), kwargs={"headers": HEADERS})
            for _ in range(64)
        ]
        for each in waiting:
            each.start()
        for path in ("/metrics", "/status", "/health"):
            asked(keyed, path)
        # Nor do calls of tasks wait for long.
        soon = {**HEADERS, "x-request-timeout": "0.5"}
        for method in ("POST", "GET", "DELETE"):
            body = {"item": 1} if method == "POST" else None
            path = "/tasks/apps.any" if body else TASK
            answer = keyed.request(method, path, json=body, headers=soon)
            assert answer.status_code in (503, 504), answer.text
        # After a pause, too, when surveys begin anew.
        wait_for(lambda: asked(keyed, "/status").json()["problem"], "a problem")
    for each in waiting:
        each.join()
    wait_for(lambda: is_up(keyed) == 1, "it is up again")
    wait_for(lambda: asked(keyed, "/health").status_code == 200, "it is healthy again")


def test_no_answer_names_address_or_user_of_redis(
    keyed: GatewayProcess, own_redis: OwnRedis
) -> None:
    own_redis.kill()
    wait_for(lambda: keyed.get("/health").status_code == 503, "unhealthy")
    assert keyed.get("/health").json() == {"detail": "Redis does not answer"}
    batch = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    posts: dict[str, Any] = {
        "/v1/embeddings": {"input": "a"},
        "/embed": {"inputs": "a"},
        "/page/try": {"model": "embed", "item": "a"},
        "/v1/batches": batch,
    }
    pages = ("/", "/page/page.js", "/status", "/metrics", "/openapi.json", "/nothing")
    own = (
        *("/v1/files", "/v1/batches", "/v1/batches/batch_1", "/batch-stats", "/health"),
        *("/tasks/1", "/v1/models", "/info", "/openapi.json", "/metrics"),
    )
    answers = [keyed.get(path) for path in pages]
    answers += [keyed.get(path, headers=HEADERS) for path in own]
    answers += [keyed.post(path, body, headers=HEADERS) for path, body in posts.items()]
    folder = str(Path(__file__).parents[2])  # Of the model.
    secrets = (USER, str(own_redis.port), "redis://", str(Path.home()), folder)
    for answer in answers:
        found: list[Any] = [each for each in secrets if each in answer.text]
        assert not found, (answer.url, found, answer.text[:500])
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
    # Whoever runs it finds out.
    assert str(own_redis.port) in keyed.log
    own_redis.start()
    add_user(own_redis)
    wait_for(lambda: keyed.get("/health").status_code == 200, "healthy again")
