"""Unit tests touch neither network nor processes; a test that tries fails and says so."""

import subprocess
from typing import Any

import pytest
import redis


@pytest.fixture(autouse=True)
def _neither_network_nor_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis.Connection, "connect", _refuse("a connection to Redis"))
    monkeypatch.setattr(subprocess, "Popen", _refuse("a process"))


def _refuse(what: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail(f"{what} in a unit test: move the test to tests/integration")

    return refuse
