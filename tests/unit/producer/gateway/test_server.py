"""The processes of a gateway, and which of them are replaced."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from batchery_producer.gateway import server
from batchery_producer.gateway.server import STUCK_LOOKS, Processes


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
    made = Processes(uvicorn.Config("app", workers=2), [], "/tmp", lambda: None)
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
