"""A guarded process: what it says, how it ends, and that it never outlives its owner."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from batchery_worker.devstack.guarded_process import GuardedProcess
from support.harness import has_ended, wait_for

FOREVER = "import time; time.sleep(600)"


def python(code: str, **options: object) -> GuardedProcess:
    return GuardedProcess([sys.executable, "-c", code], grace_s=5, **options)  # type: ignore[arg-type]


def owner(tmp_path: Path, code: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Runs code that starts guarded processes and prints their pids in one line."""
    program = (
        "import os, sys, threading, time\n"
        f"from batchery_worker.devstack.guarded_process import GuardedProcess\n{code}"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout:
        process.stdout.close()


def test_exit_code_and_output_reach_the_owner() -> None:
    lines: list[str] = []
    process = python("print('hello'); print('world'); raise SystemExit(7)", on_line=lines.append)
    assert process.wait(30) == 7
    assert lines == ["hello", "world"]
    assert process.tail() == "hello\nworld"
    assert process.tail(1) == "world"


def test_a_death_by_signal_is_told_as_a_shell_tells_it() -> None:
    process = python(FOREVER)
    assert process.poll() is None
    assert process.kill() == 128 + signal.SIGKILL
    assert process.poll() == 128 + signal.SIGKILL


def test_a_program_that_cannot_be_run_is_an_error_that_names_it() -> None:
    with pytest.raises(OSError, match="/no/such/program: No such file or directory"):
        GuardedProcess(["/no/such/program"], grace_s=1)


def test_process_that_ignores_sigterm_is_killed_after_the_timeout() -> None:
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True)"
    process = python(f"{ignore}; {FOREVER}")
    wait_for(lambda: process.tail() == "on", "the process ignores SIGTERM")
    with pytest.raises(TimeoutError):
        process.wait(0.1)
    assert process.stop(timeout_s=0.2) == 128 + signal.SIGKILL


def test_stopping_it_twice_does_no_harm() -> None:
    process = python(FOREVER)
    assert process.stop(30) == process.stop(30) == 128 + signal.SIGTERM


def test_rest_of_the_process_group_ends_with_the_process() -> None:
    spawn = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    process = GuardedProcess(
        [sys.executable, "-c", f"{spawn}; print(p.pid, flush=True); p.wait()", FOREVER], grace_s=5
    )
    child = int(wait_for(process.tail, "the pid of its child"))
    process.kill()
    wait_for(lambda: has_ended(child), "the child ends")


def test_a_listener_that_fails_does_not_block_the_process() -> None:
    def fail(line: str) -> None:
        raise BrokenPipeError

    process = python("for n in range(50_000): print('a line that fills the pipe')", on_line=fail)
    assert process.wait(60) == 0


def test_a_ctrl_c_in_the_terminal_does_not_reach_it() -> None:
    process = python(FOREVER)
    assert os.getsid(process.pid) != os.getsid(0)
    process.kill()


def test_process_and_its_directory_go_when_the_owner_is_killed(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.mkdir()
    process, [pid] = owner(
        tmp_path,
        f"process = GuardedProcess([sys.executable, '-c', {FOREVER!r}], grace_s=5,"
        f" remove={str(rubbish)!r})\nprint(process.pid, flush=True)\ntime.sleep(600)",
    )
    kill(process)
    wait_for(lambda: has_ended(pid) and not rubbish.exists(), "process and directory are gone")


def test_process_survives_the_thread_that_started_it() -> None:
    started: list[GuardedProcess] = []
    thread = threading.Thread(target=lambda: started.append(python("input(); print('never')")))
    thread.start()
    thread.join()
    forever: list[GuardedProcess] = []
    thread = threading.Thread(target=lambda: forever.append(python(FOREVER)))
    thread.start()
    thread.join()
    # The first reads from an empty stdin and has ended; the second had as much time to end.
    assert started[0].wait(30) == 1
    assert forever[0].poll() is None
    forever[0].kill()


def test_a_fork_of_the_owner_does_not_keep_it_alive(tmp_path: Path) -> None:
    process, [pid, fork] = owner(
        tmp_path,
        f"process = GuardedProcess([sys.executable, '-c', {FOREVER!r}], grace_s=5)\n"
        "fork = os.fork()\n"
        "if fork: print(process.pid, fork, flush=True)\n"
        "time.sleep(600)",
    )
    try:
        kill(process)
        wait_for(lambda: has_ended(pid), "the process ends")
        assert psutil.pid_exists(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_a_process_that_holds_the_lifeline_keeps_it_alive(tmp_path: Path) -> None:
    process, [first, second] = owner(
        tmp_path,
        f"first = GuardedProcess([sys.executable, '-c', {FOREVER!r}], grace_s=5)\n"
        "linger = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);'"
        " 'print(1, flush=True); time.sleep(600)'\n"
        "second = GuardedProcess([sys.executable, '-c', linger], grace_s=600,"
        " keep_open=[first.lifeline])\n"
        "while not second.tail(): time.sleep(0.02)\n"
        "print(first.pid, second.pid, flush=True)\ntime.sleep(600)",
    )
    kill(process)
    assert not has_ended(first)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: has_ended(first), "the first ends after the second")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_process_ends_when_its_guard_is_killed() -> None:
    process = python(FOREVER)
    guard = psutil.Process(process.pid).parent()
    assert guard is not None
    guard.kill()
    wait_for(lambda: has_ended(process.pid), "the process ends")
    assert process.wait(30) == -signal.SIGKILL
