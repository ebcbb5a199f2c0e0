"""The examples, as their readers start them: a web server beside a worker, asked over HTTP."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from celery import Celery

from conftest import StartWorker
from support.harness import TESTS, Worker, queue_length, unsettled, wait_for
from support.patience import patient

#: How many callers there are at a time.
CALLERS = 300

#: Connections of the client: one to send, one for results, one to revoke, some that end, and those
#: with which it has asked workers why a call took too long.
FEW = 10

Scene = Callable[[httpx2.AsyncClient], Awaitable[Any]]


class Web:
    """The example, as a uvicorn process."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self._log_file = directory / "web.log"
        uvicorn = str(Path(sys.executable).with_name("uvicorn"))
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(
                # What is asked after a pause finds its connection open.
                [uvicorn, "fastapi_app:app", "--port", "0", "--timeout-keep-alive", "600"],
                cwd=TESTS.parent / "examples",
                env={
                    **os.environ,
                    "BATCHERY_REDIS_URL": redis_url,
                    "BATCHERY_CLASSES": '{"all": {"level": 0, "share": 1, "max_waiting": 10000}}',
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def wait_ready(self) -> "Web":
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return "Uvicorn running" in self.log

        wait_for(ready, "the web server listens", patient(60))
        return self

    @property
    def url(self) -> str:
        found = re.search(r"Uvicorn running on (http://\S+)", self.log)
        assert found, self.log
        return found[1]

    def connections(self, store: Any) -> list[Any]:
        """Its connections to Redis, as Redis sees them."""
        held = psutil.Process(self.process.pid).net_connections("tcp")
        ports = {str(each.laddr.port) for each in held}
        return [each for each in store.client_list() if each["addr"].rpartition(":")[2] in ports]

    def play(self, scene: Scene) -> Any:
        """Runs a scene with an HTTP client, on an event loop of its own."""

        async def whole() -> Any:
            limits = httpx2.Limits(max_connections=None)
            limit_s = patient(90)
            async with httpx2.AsyncClient(
                base_url=self.url, timeout=limit_s, limits=limits
            ) as http:
                return await scene(http)

        return asyncio.run(asyncio.wait_for(whole(), patient(90)))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts that were computed, one in each line."""
    path = tmp_path_factory.mktemp("trace") / "texts"
    path.touch()
    return path


@pytest.fixture(scope="module")
def embedder(start_module_worker: StartWorker, trace: Path) -> Worker:
    """A worker that serves the queue of a model."""
    return start_module_worker("apps.embedder", "-Q", "embed", env={"TRACE": str(trace)})


@pytest.fixture(scope="module")
def web(
    tmp_path_factory: pytest.TempPathFactory, redis_url: str, embedder: Worker
) -> Iterator[Web]:
    made = Web(tmp_path_factory.mktemp("web"), redis_url)
    try:
        yield made.wait_ready()
    finally:
        made.process.kill()
        made.process.wait()


async def ask(http: httpx2.AsyncClient, text: str, **others: Any) -> httpx2.Response:
    # The longest that it allows: while the device is held, a slow machine may stand still.
    return await http.post("/embed", json={"text": text, "timeout_s": 60, **others})


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(wait_for, condition, what, patient(60))


async def hold(http: httpx2.AsyncClient, gate: Path, trace: Path) -> "asyncio.Task[Any]":
    """Keeps the device busy until there is such a file."""
    held = asyncio.create_task(ask(http, str(gate)))
    await until(lambda: str(gate) in trace.read_text(), "the device is held")
    return held


def jobs(redis_url: str) -> int:
    """Jobs that have not ended, wherever they are."""
    return queue_length(redis_url, "embed") + unsettled(redis_url)


def test_hundreds_of_requests_share_batches_and_few_connections(
    tmp_path: Path, redis_url: str, web: Web, trace: Path, store: Any
) -> None:
    gate = tmp_path / "gate"
    texts = [f"text {number}" for number in range(CALLERS)]

    async def scene(http: httpx2.AsyncClient) -> Any:
        held = await hold(http, gate, trace)
        calls = [asyncio.create_task(ask(http, text)) for text in texts]
        await until(lambda: jobs(redis_url) == CALLERS + 1, "all requests are jobs")
        connections = web.connections(store)
        gate.touch()
        answers = await asyncio.gather(held, *calls)
        return connections, answers

    connections, (held, *answers) = web.play(scene)
    assert held.status_code == 200
    assert {each.status_code for each in answers} == {200}
    assert [each.json()["text"] for each in answers] == [text.upper() for text in texts]
    assert max(each.json()["batch"] for each in answers) > 32
    assert 0 < len(connections) <= FEW
    assert not any(int(each["sub"]) for each in connections)
    wait_for(lambda: jobs(redis_url) == 0, "nothing is left")


def test_errors_have_a_status_of_their_own(tmp_path: Path, web: Web, trace: Path) -> None:
    gate = tmp_path / "gate"

    async def scene(http: httpx2.AsyncClient) -> Any:
        bad = [await ask(http, "too long"), await ask(http, "out of luck")]
        bad.append(await http.post("/embed", json={"words": "none"}))
        held = await hold(http, gate, trace)
        bad.append(await ask(http, "patience", timeout_s=0.05))
        gate.touch()
        await held
        return bad

    invalid, failed, nonsense, late = web.play(scene)
    assert (invalid.status_code, invalid.json()) == (422, {"detail": "3 tokens, at most 2"})
    assert (failed.status_code, failed.json()) == (502, {"detail": "LookupError: no such word"})
    assert nonsense.status_code == 422
    assert (late.status_code, late.json()) == (504, {"detail": "no answer within 0.05 s"})


def test_a_full_queue_sends_callers_away(
    web: Web, embedder: Worker, client: Celery, store: Any
) -> None:
    options: Any = {
        "destination": [embedder.name],
        "reply": True,
        "timeout": patient(60),
        "limit": 1,
    }

    async def scene(http: httpx2.AsyncClient) -> Any:
        return await ask(http, "one too many")

    assert client.control.cancel_consumer("embed", **options)
    try:
        store.lpush("embed", *["not for anybody"] * 10_000)
        full = web.play(scene)
    finally:
        store.delete("embed")
        assert client.control.add_consumer("embed", **options)
    assert (full.status_code, full.json()) == (503, {"detail": "too many are waiting"})
    assert int(full.headers["Retry-After"]) >= 1
    assert web.play(scene).json()["text"] == "ONE TOO MANY"
