"""Unit tests touch neither network nor processes; a test that tries fails and says so."""

import gc
import subprocess
import threading
from typing import Any

import celery
import pytest
import redis

from support.patience import patient


@pytest.fixture(scope="session", autouse=True)
def _results_of_other_tests_are_gone() -> None:
    """One of Celery's that is collected ends its subscription, for which it connects anew."""
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _clients_of_other_tests_have_ended() -> None:
    """One that was closed while Redis hung asks it once more, for seconds, to revoke its jobs."""
    for thread in threading.enumerate():
        if thread.name == "batchery-session":
            thread.join(patient(30.0))


@pytest.fixture(autouse=True)
def _neither_network_nor_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis.Connection, "connect", _refuse("a connection to Redis"))
    monkeypatch.setattr(subprocess, "Popen", _refuse("a process"))


@pytest.fixture(autouse=True)
def _apps_have_their_own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Celery gives the shared tasks of any module to each app that is finalized later."""
    state: Any = celery._state
    kept = {each for each in state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(state, "_on_app_finalizers", kept)


def _refuse(what: str) -> Any:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail(f"{what} in a unit test: move the test to tests/integration")

    return refuse
