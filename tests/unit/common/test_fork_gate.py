"""No process forks while a thread works, and connections of the parent are closed in the child."""

import threading

import pytest

from batchery.fork_gate import ForkGate


class Connection:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_fork_waits_until_no_thread_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchery.fork_gate.MAX_WAIT_S", 30.0)
    gate, order = ForkGate(), list[str]()
    working, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with gate.working():
            working.set()
            may_end.wait()
            order.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    working.wait()
    threading.Timer(0.01, may_end.set).start()
    gate.before_fork()
    order.append("forked")
    gate.after_in_parent()
    thread.join()
    assert order == ["worked", "forked"]


def test_thread_begins_no_work_during_a_fork() -> None:
    gate, order = ForkGate(), list[str]()
    gate.before_fork()

    def work() -> None:
        with gate.working():
            order.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(0.05)
    order.append("forked")
    gate.after_in_parent()
    thread.join()
    assert order == ["forked", "worked"]


def test_thread_that_works_for_long_holds_no_fork_up() -> None:
    gate, done = ForkGate(), threading.Event()
    working = threading.Event()

    def work() -> None:
        with gate.working():
            working.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    working.wait()
    gate.before_fork()
    gate.after_in_parent()
    done.set()
    thread.join()


def test_child_begins_anew_and_closes_the_connections_of_its_parent() -> None:
    gate, connection = ForkGate(), Connection()
    gate.keep_private(connection)
    gate.before_fork()
    gate.after_in_child()
    assert connection.is_closed
    with gate.working():
        pass
