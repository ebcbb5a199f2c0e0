"""What systemd is told, by its own protocol."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from batchery_worker.operations import systemd
from batchery_worker.operations.health import Verdict
from batchery_worker.operations.step import Beats


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The socket of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield made


def test_nobody_is_told_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not systemd.is_listening()
    systemd.notify("READY=1")


def test_words_reach_sockets_with_and_without_a_file(
    listener: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert systemd.is_listening()
    systemd.notify("READY=1")
    assert listener.recv(100) == b"READY=1"
    name = f"batchery-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        systemd.notify("WATCHDOG=1")
        assert abstract.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("30000000", "", 30.0),
        ("30000000", "me", 30.0),
        ("30000000", "1", None),
        ("", "", None),
        ("soon", "", None),
        ("0", "", None),
    ],
)
def test_watchdog_is_that_of_this_process(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, expected: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "me" else pid)
    assert systemd.read_watchdog_s() == expected


class Watch:
    """A worker whose health is the test's."""

    verdict = Verdict("", "device cpu is not ready")

    def judge(self) -> Verdict:
        return self.verdict


def test_systemd_hears_that_a_worker_is_ready_once_and_that_it_lives_again_and_again(
    listener: Any,
) -> None:
    watch: Any = Watch()
    beats = Beats(watch, None)
    beats.beat(0.0)
    assert listener.recv(100) == b"WATCHDOG=1"
    watch.verdict = Verdict("", "")
    for _ in range(2):
        beats.beat(0.0)
    assert [listener.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    watch.verdict = Verdict("device cpu hung", "device cpu hung")
    beats.beat(0.0)
    systemd.notify("STOPPING=1")
    assert listener.recv(100) == b"STOPPING=1"
