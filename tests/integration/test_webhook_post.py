"""Webhooks over TLS: a receiver whose certificate does not hold gets nothing."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchery_producer.gateway.webhooks import Undeliverable, post, resolve_target
from support.webhook_receiver import WebhookReceiver

HOSTS = ("localhost", "127.0.0.1", "::1")


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
    post(resolve_target(f"{url}/done?a=b", HOSTS), HOSTS, b"{}", "the-id", 1, None)


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
        post(resolve_target(url, hosts), hosts, b"{}", "the-id", 1, None)
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
