"""What the worker beside a gateway does all the time."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from batchery_producer.gateway import jobs
from batchery_producer.gateway.problems import Kind, Problem


def test_lost_redis_is_logged_once_however_often_it_is_looked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[int] = []
    ended = threading.Event()

    def sweep() -> None:
        looks.append(1)
        if len(looks) == 5:
            ended.set()
        raise Problem(Kind.UNAVAILABLE, "Redis does not answer")

    found: Any = SimpleNamespace(remove_torn=lambda: None, sweep=sweep)
    monkeypatch.setattr(jobs, "get_jobs", lambda _: found)
    monkeypatch.setattr(jobs, "SWEEP_S", 0.001)
    monkeypatch.setattr(jobs, "_ended", ended)
    app: Any = None
    jobs._sweep_on(app)
    assert len(looks) == 5
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["jobs of the gateway: cannot be looked for: Redis does not answer"]


def test_what_killed_processes_leave_is_looked_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    sweeps: list[int] = []
    ended = threading.Event()

    def remove_torn() -> None:
        looks.append(1)
        if len(looks) == 3:
            ended.set()

    def sweep() -> None:
        sweeps.append(1)
        if len(sweeps) == 1000:
            ended.set()

    found: Any = SimpleNamespace(remove_torn=remove_torn, sweep=sweep)
    monkeypatch.setattr(jobs, "get_jobs", lambda _: found)
    monkeypatch.setattr(jobs, "SWEEP_S", 0.001)
    monkeypatch.setattr(jobs, "TORN_LOOK_S", 0.01, raising=False)
    monkeypatch.setattr(jobs, "_ended", ended)
    app: Any = None
    jobs._sweep_on(app)
    assert len(looks) == 3


def test_worker_that_starts_while_its_gateway_ends_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting, may_start, told = threading.Event(), threading.Event(), threading.Event()

    class SlowProcess:
        exitcode = 0

        def __init__(self, **_: Any) -> None: ...

        def start(self) -> None:
            starting.set()
            assert may_start.wait(60)

        def join(self) -> None:
            assert told.wait(60)

        def terminate(self) -> None:
            told.set()

    context = SimpleNamespace(Process=SlowProcess)
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)
    load: Any = None

    def run() -> None:
        with jobs.worker_beside(load):
            assert starting.wait(60)

    gateway = threading.Thread(target=run, daemon=True)
    gateway.start()
    assert starting.wait(60)
    threading.Timer(0.2, may_start.set).start()
    gateway.join(10)
    assert told.is_set()
