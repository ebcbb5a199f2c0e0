"""How webhooks are posted: over TLS, to receivers that trickle or are busy, by killed workers."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from batchery_producer.gateway.callers import make_key, make_webhook_secret
from batchery_producer.gateway.webhooks import Undeliverable, find_target, post
from conftest import StartGateway
from support.gateway import GatewayProcess
from support.harness import Worker, wait_for
from support.patience import patient
from support.webhook_receiver import WebhookReceiver

KEY, HASH = make_key()
OTHER_KEY, OTHER_HASH = make_key()


class Trickling:
    """A receiver that answers byte by byte, and never to an end."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listening = socket.create_server((host, 0))
        self.url = f"http://{host}:{self._listening.getsockname()[1]}"
        self._lock = threading.Lock()
        self._is_over = False
        self._connections: list[socket.socket] = []
        self.open = self.most = self.came = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._trickle, args=(connection,), daemon=True).start()

    def _trickle(self, connection: socket.socket) -> None:
        with self._lock:
            self.came += 1
            self.open += 1
            self._connections.append(connection)
            # Threads of those whose other side has left may not have seen it yet.
            self.most = max(self.most, sum(map(is_established, self._connections)))
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not self._is_over:
                connection.sendall(b"a")
                # Until the other side has left.
                connection.settimeout(0.2)
                try:
                    if not connection.recv(65536):
                        break
                except TimeoutError:
                    pass
        with self._lock, connection:
            self._connections.remove(connection)
            self.open -= 1


def is_established(connection: socket.socket) -> bool:
    """Whether neither side has closed a connection."""
    # The first byte is its state, as Linux counts them.
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01"


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, worker: Worker, redis_url: str) -> GatewayProcess:
    settings = {
        "tasks": ["apps.shop.*"],
        "webhook_hosts": ["127.0.0.0/8"],
        "keys": {
            name: {"hash": hashed, "webhook_secret": make_webhook_secret()}
            for name, hashed in (("shop", HASH), ("other", OTHER_HASH))
        },
        "worker": True,
    }
    return start_gateway(
        "-A",
        "apps.shop",
        models={},
        gateway=settings,
        environment={"CELERY_BROKER_URL": redis_url, "CELERY_RESULT_BACKEND": redis_url},
    )


def later(gateway: GatewayProcess, webhook: str, key: str = KEY) -> str:
    """Sends a task whose result is posted; returns its id."""
    body = {"item": "hello", "wait_s": 0, "webhook": webhook}
    headers = {"authorization": f"Bearer {key}"}
    answer = gateway.request("POST", "/tasks/apps.shop.shout", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


@pytest.fixture
def trickling() -> Iterator[list[Trickling]]:
    with ExitStack() as stack:
        hosts = [f"127.0.1.{number}" for number in range(1, 21)]
        yield [stack.enter_context(Trickling(host)) for host in hosts]


def test_receivers_that_never_end_stop_nobody_else_s(
    gateway: GatewayProcess, trickling: list[Trickling]
) -> None:
    for each in trickling:
        later(gateway, each.url)
    wait_for(lambda: sum(each.open for each in trickling) > 2, "some of them are busy")
    with WebhookReceiver() as receiver:
        later(gateway, receiver.url, OTHER_KEY)
        wait_for(lambda: receiver.received, "the webhook of another caller", patient(60))
    # Its own places come back, too.
    wait_for(lambda: sum(each.came > 0 for each in trickling) > 8, "the others' turn", patient(90))


# One attempt


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def certificate(folder: Path, name: str) -> Path:
    """A certificate for a host name that has signed itself, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = folder / f"{name}.pem"
    new = folder / "certificate"
    options = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}")
    files = ("-addext", f"subjectAltName=DNS:{name}", "-keyout", str(path), "-out", str(new))
    subprocess.run(["openssl", "req", *options, *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + new.read_bytes())
    return path


def receiver(path: Path) -> WebhookReceiver:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(path)
    return WebhookReceiver(tls=tls)


def send(url: str) -> None:
    post(find_target(f"{url}/done?a=b", LOOPBACK), LOOPBACK, b"{}", "the-id", None)


def test_webhook_arrives_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = certificate(tmp_path, "localhost")
    # As an operator names the authority of an own network.
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with receiver(path) as listening:
        send(listening.url)
    (received,) = listening.received
    assert (received.path, received.body) == ("/done?a=b", b"{}")
    assert received.headers["Host"] == listening.url.removeprefix("https://")


def test_webhook_goes_to_the_next_address_where_nobody_listens_at_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look_up = socket.getaddrinfo

    def find(host: str, *arguments: Any, **options: Any) -> list[Any]:
        names = ("10.0.0.1", "127.0.0.2", "127.0.0.1") if host == "hooks.example" else (host,)
        return [found for each in names for found in look_up(each, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", find)
    hosts = ("hooks.example", "127.0.0.0/8")
    with WebhookReceiver() as listening:
        url = listening.url.replace("127.0.0.1", "hooks.example")
        post(find_target(url, hosts), hosts, b"{}", "the-id", None)
    assert len(listening.received) == 1


@pytest.mark.parametrize(
    ("name", "is_trusted", "why"),
    [("localhost", False, "self-signed certificate"), ("elsewhere", True, "Hostname mismatch")],
)
def test_receiver_whose_certificate_does_not_hold_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_trusted: bool, why: str
) -> None:
    path = certificate(tmp_path, name)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with receiver(path) as listening, pytest.raises(Undeliverable, match=why) as raised:
        send(listening.url)
    # It may be mended before the next attempt.
    assert not raised.value.is_final
    assert listening.received == []
