"""The worker beside a gateway."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from batchery_producer.gateway import jobs


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
    gateway.join(60)
    assert told.is_set()
