"""What is switched on beside a worker, and where something is missing for it."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.errors import StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.metrics_settings import MetricsSettings
from batchery_worker.operations import step
from batchery_worker.operations.step import make_parts


def make_step(*queues: str) -> tuple[Any, Any]:
    """A step, and the worker beside which it is."""
    amqp = SimpleNamespace(queues=SimpleNamespace(consume_from=dict.fromkeys(queues)))
    worker: Any = SimpleNamespace(app=SimpleNamespace(amqp=amqp), pool=SimpleNamespace())
    return step.WatchStep(worker), worker


@pytest.fixture(autouse=True)
def _port_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(max_pass_s=None, metrics=MetricsSettings(port=0))
    monkeypatch.setattr(step, "get_installation", lambda _: SimpleNamespace(settings=settings))


def test_port_answers_once_processes_are_forked() -> None:
    made, worker = make_step("celery")
    made.create(worker)
    (port,) = made._parts
    with contextlib.closing(port):
        assert made._waiting == [port]
        worker.pool.on_forked()
        made.start(worker)
        assert made._waiting == []
        assert port.server_address[1] > 0


def test_gateway_s_own_worker_takes_nobody_s_port() -> None:
    made, worker = make_step(JOBS_QUEUE)
    made.create(worker)
    assert made._parts == ()
    # It can be asked all the same.
    assert worker.watch is made._watch


def test_nothing_is_switched_on_unless_the_settings_say_so() -> None:
    watch: Any = None
    assert make_parts(watch, MetricsSettings()) == []


def test_file_of_a_worker_that_has_ended_does_not_come_back(tmp_path: Path) -> None:
    path = tmp_path / "worker.prom"
    textfile = step.Textfile(str(path), lambda: path.touch())
    textfile.write()
    assert path.exists()
    textfile.remove()
    # The thread that writes goes on until the process ends.
    textfile.write()
    assert not path.exists()
    textfile.remove()


@pytest.mark.parametrize("setting", [{"port": 0}, {"textfile": "worker.prom"}])
def test_missing_package_is_named(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "batchery.operations.families", raising=False)
    monkeypatch.delattr("batchery.operations.families", raising=False)
    watch: Any = None
    with pytest.raises(StartError, match=r"pip install 'batchery\[metrics\]'"):
        make_parts(watch, MetricsSettings(**setting))
