"""Is there a Redis? One line if not."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from batchery.cli.app import check_redis, masked
from batchery.errors import RedisUnavailable
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import find_redis_server, free_port
from support.harness import open_redis, wait_for
from support.redis_places import with_password


def refusal(url: str, **options: Any) -> str:
    with pytest.raises(RedisUnavailable) as caught:
        check_redis(url, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_redis_that_answers_is_fine(redis_url: str) -> None:
    check_redis(redis_url)


def test_a_valkey_url_is_as_good(redis_url: str) -> None:
    check_redis(redis_url.replace("redis", "valkey", 1))


def test_nobody_there_is_said_at_once_with_the_password_masked() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    start_s = time.monotonic()
    said = refusal(url, timeout_s=60)
    assert time.monotonic() - start_s < 30
    assert url.replace("secret", "**") in said
    assert "refused" in said
    assert "batchery up" in said


def test_a_host_that_accepts_and_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = refusal(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout_s=0.2)
    assert "imeout" in said


def test_a_wrong_and_a_missing_password_are_told_apart_from_no_redis(redis_url: str) -> None:
    for password in ("", "wrong"):
        said = refusal(with_password(redis_url, password))
        assert "check user and password" in said
        assert "wrong" not in said.lower().replace("wrongpass", "")


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "", "redis://h:port/0"])
def test_invalid_redis_url_says_how_to_write_one(url: str) -> None:
    assert "redis://HOST:PORT/0" in refusal(url)


def test_a_socket_in_the_file_system_works_in_celerys_spelling(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    command = [str(find_redis_server()), "--port", "0", "--unixsocket", str(path)]
    server = GuardedProcess([*command, "--requirepass", "secret"], grace_s=5, directory=tmp_path)
    wait_for(path.exists, "the socket")
    check_redis(f"redis+socket://:secret@{path}?virtual_host=1")
    assert "check user and password" in refusal(f"redis+socket://{path}")
    server.stop()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p@ss/word@host:1/0", "redis://:**@host:1/0"),
        ("rediss://user:secret@host", "rediss://user:**@host"),
        ("unix:///path?db=1&password=secret", "unix:///path?db=1&password=**"),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown


def test_sentinels_are_left_to_celery() -> None:
    check_redis("sentinel://127.0.0.1:1;sentinel://127.0.0.1:2")


def test_the_check_leaves_no_connection_behind(redis_url: str) -> None:
    with open_redis(redis_url) as client:
        before = len(client.client_list())
        check_redis(redis_url)
        wait_for(lambda: len(client.client_list()) <= before, "its connection is closed")
