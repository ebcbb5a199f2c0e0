"""The processes of a gateway, and which of them are replaced."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from batchery.errors import StartError
from batchery_producer.gateway import server
from batchery_producer.gateway.server import (
    START_AGAIN_S,
    STUCK_LOOKS,
    Processes,
    ServeOptions,
)


class OtherProcess:
    """A process that answers when the test says so."""

    def __init__(self, *_: object) -> None:
        self.parent_conn, self.child_conn = multiprocessing.Pipe()
        self.process = SimpleNamespace(is_alive=lambda: self.exitcode is None)
        self.exitcode: int | None = None
        self.pid = id(self)

    def answer(self) -> None:
        assert self.child_conn.poll()
        self.child_conn.recv()
        self.child_conn.send(True)

    def start(self) -> None:
        """Starts nothing."""

    def join(self) -> None:
        """Has ended."""

    def kill(self) -> None:
        if self.exitcode is None:
            self.exitcode = -9


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    monkeypatch.setattr(server, "Process", OtherProcess)
    monkeypatch.setattr(server, "mark_process_dead", lambda *_: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    options = ServeOptions("batchery.app", metrics_folder="/tmp")
    made = Processes(uvicorn.Config("app", workers=2), [], options, lambda: None)
    first: Any = OtherProcess()
    second: Any = OtherProcess()
    made.processes = [first, second]
    return made


def test_process_that_answers_late_goes_on_and_one_that_never_does_is_replaced(
    processes: Processes,
) -> None:
    late, never = list(processes.processes)
    assert isinstance(late, OtherProcess)
    for _ in range(STUCK_LOOKS):
        processes.keep_subprocess_alive()
    assert processes.processes == [late, never]
    late.answer()
    processes.keep_subprocess_alive()
    assert processes.processes[0] is late
    assert processes.processes[1] is not never
    assert never.exitcode == -9


def test_process_that_has_died_is_replaced_at_once(processes: Processes) -> None:
    died: Any = processes.processes[1]
    died.exitcode = -11
    processes.keep_subprocess_alive()
    assert died not in processes.processes
    assert len(processes.processes) == 2


def test_process_that_cannot_start_stops_the_gateway(processes: Processes) -> None:
    broken: Any = processes.processes[0]
    broken.exitcode = STARTUP_FAILURE
    processes.keep_subprocess_alive()
    assert processes.should_exit.is_set()
    assert processes.cannot_start


def test_mistake_stops_a_gateway_that_has_not_served_yet(processes: Processes) -> None:
    broken: Any = processes.processes[0]
    broken.exitcode = StartError.exit_code
    processes.keep_subprocess_alive()
    assert processes.should_exit.is_set()
    assert processes.cannot_start


def test_mistake_ends_no_gateway_that_serves_and_is_seldom_tried_again(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: now_s))
    processes.keep_subprocess_alive()
    serving: Any = processes.processes[0]
    serving.answer()
    tried = []
    for _ in range(40):
        broken: Any = processes.processes[1]
        broken.exitcode = StartError.exit_code
        processes.keep_subprocess_alive()
        if processes.processes[1] is not broken:
            tried.append(now_s)
        now_s += 0.5
    assert tried == [1000.0, 1000.0 + START_AGAIN_S]
    assert processes.processes[0] is serving
    assert not processes.should_exit.is_set()


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_worker_beside_is_replaced_when_all_processes_are(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, replaced: int
) -> None:
    def restart_all() -> None:
        assert not done, "the worker goes last"
        for index in range(replaced):
            new: Any = OtherProcess()
            processes.processes[index] = new

    done: list[str] = []
    monkeypatch.setattr(server, "read_anew", lambda _: object())
    monkeypatch.setattr(processes, "restart_all", restart_all)
    monkeypatch.setattr(processes, "_replace_worker", lambda: done.append("worker"))
    processes.handle_hup()
    assert done == (["worker"] if replaced == 2 else [])
