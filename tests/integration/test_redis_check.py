"""Is there a Redis? One line if not."""

import socket
import ssl
from pathlib import Path

import pytest
from celery import Celery

from batchery.cli.app import check_backend, check_broker, check_redis
from batchery.errors import RedisUnavailable
from batchery.installation import use_redis
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import find_redis_server
from support.harness import open_redis, wait_for
from support.own_redis import OwnRedis
from support.redis_places import behind_tls, make_certificate, with_password


def refusal(url: str) -> str:
    with pytest.raises(RedisUnavailable) as caught:
        check_redis(url)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_redis_that_answers_is_fine_and_is_left_alone(redis_url: str) -> None:
    with open_redis(redis_url) as client:
        before = len(client.client_list())
        check_redis(redis_url)
        wait_for(lambda: len(client.client_list()) <= before, "its connections are closed")


def test_nobody_there_is_said_at_once_with_the_password_masked() -> None:
    url = "redis://:secret@127.0.0.1:1/0"
    said = refusal(url)
    assert url.replace("secret", "**") in said
    assert "refused" in said
    assert "batchery up" in said


def test_the_redis_that_is_given_outranks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere:1/0")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://elsewhere:1/0")
    app = Celery(set_as_current=False)
    app.conf.update(broker_url="redis://elsewhere:2/0")
    url = "redis://127.0.0.1:1/0"  # Nobody listens there.
    use_redis(app, url)
    for check in (check_broker, check_backend):
        with pytest.raises(RedisUnavailable, match=url):
            check(app)


def test_a_host_that_accepts_and_never_answers_is_given_up() -> None:
    app = Celery(set_as_current=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_redis(app, f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        with pytest.raises(RedisUnavailable, match="Timeout"):
            check_broker(app, timeout_s=0.2)


def test_a_wrong_and_a_missing_password_are_told_apart_from_no_redis(redis_url: str) -> None:
    for password in ("", "wrong"):
        said = refusal(with_password(redis_url, password))
        assert "check user and password" in said
        assert "wrong" not in said.lower().replace("wrongpass", "")


def test_a_socket_in_the_file_system_works_in_celerys_spelling(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    command = [str(find_redis_server()), "--port", "0", "--unixsocket", str(path)]
    server = GuardedProcess([*command, "--requirepass", "secret"], cwd=tmp_path)
    # The socket is there before anybody listens to it.
    wait_for(lambda: "ready to accept connections" in server.tail(), "redis-server")
    check_redis(f"redis+socket://:secret@{path}?virtual_host=1")
    assert "check user and password" in refusal(f"redis+socket://{path}")
    server.stop()


def test_a_redis_behind_tls_is_asked_as_celery_asks_it(
    tmp_path: Path, every_redis: OwnRedis
) -> None:
    certificate = make_certificate(tmp_path)
    authority = str(certificate.authority)
    with behind_tls(every_redis.port, certificate) as url:
        bare = url.partition("?")[0]
        spelled = f"{bare}?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={authority}"
        apps = [Celery(broker=each, backend=each, set_as_current=False) for each in (url, spelled)]
        for each in (bare, bare.replace("rediss", "redis")):
            apps.append(Celery(broker=each, backend=each, set_as_current=False))
            options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": authority}
            apps[-1].conf.update(broker_use_ssl=options, redis_backend_use_ssl=options)
        for app in apps:
            check_broker(app)
            check_backend(app)
        (tmp_path / "other").mkdir()
        other = make_certificate(tmp_path / "other").authority
        wrong = f"{bare}?ssl_cert_reqs=required&ssl_ca_certs={other}"
        stranger = Celery(broker=wrong, backend=wrong, set_as_current=False)
        for check in (check_broker, check_backend):
            with pytest.raises(RedisUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                check(stranger)
