"""Posts a result to the URL that its caller named, signed as standardwebhooks.com says."""

import base64
import hashlib
import hmac
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from batchery_producer.gateway.tasks.webhook_target import WebhookTarget, may_connect

#: How long an attempt may take from its connection to the last byte of the answer's head, in
#: seconds, however slowly a receiver reads and writes.
DEADLINE_S = 10.0

#: Receivers that answer so do not want it any more.
GONE = 410


class Undeliverable(Exception):
    """A result that could not be posted; the text says why.

    Attributes:
        is_final: Whether another attempt is useless.
    """

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        super().__init__(why)
        self.is_final = is_final


def signature(secret: bytes, message_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of the header `webhook-signature`: HMAC-SHA256 of id, time and body."""
    signed = b"%b.%d.%b" % (message_id.encode(), timestamp_s, body)
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def derive_secret(key_hash: str) -> bytes:
    """What a caller's webhooks are signed with: the SHA-256 of their key, which both sides have.

    Args:
        key_hash: As in the settings: `sha256:` and hexadecimal digits.
    """
    return bytes.fromhex(key_hash.removeprefix("sha256:"))


def post(
    target: WebhookTarget,
    hosts: Sequence[str],
    body: bytes,
    message_id: str,
    now_s: int,
    secret: bytes | None,
) -> None:
    """Posts once, and follows no redirect.

    Args:
        target: Where to.
        hosts: The setting `gateway.webhook_hosts`.
        body: JSON.
        message_id: The same for each attempt, so that a receiver knows repetitions.
        now_s: The time, in Unix seconds.
        secret: What to sign with; None for no signature.

    Raises:
        Undeliverable: It did not arrive.
    """
    headers = {
        "Host": target.host_header,
        "Content-Type": "application/json",
        "User-Agent": "batchery",
        "Connection": "close",
        "webhook-id": message_id,
        "webhook-timestamp": str(now_s),
    }
    if secret is not None:
        headers["webhook-signature"] = signature(secret, message_id, now_s, body)
    connection = http.client.HTTPConnection(target.host, target.port)
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        # Connected here, so that it goes to an address that was checked.
        connection.sock = sock = _connected(target, hosts)
        with _shut_at(sock, deadline_s):
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection.request("POST", target.path, body, headers)
            # The body of the answer is not read.
            status = connection.getresponse().status
        if time.monotonic() >= deadline_s:
            # What was cut off may look like a head.
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        if time.monotonic() >= deadline_s:
            why = f"no answer within {DEADLINE_S:g} s"
        raise Undeliverable(why) from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise Undeliverable(f"it answered {status}", is_final=status == GONE)


@contextmanager
def _shut_at(sock: socket.socket, deadline_s: float) -> Iterator[None]:
    """Shuts a connection at a time, unless the block has ended: timeouts are for each byte."""

    def shut() -> None:
        with suppress(OSError):  # The other side was first.
            # Not by the method of TLS, which is not for another thread.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline_s - time.monotonic()), shut)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connected(target: WebhookTarget, hosts: Sequence[str]) -> socket.socket:
    """A connection to an allowed address of the host; over TLS it has yet to shake hands.

    Raises:
        OSError: It cannot be had.
        Undeliverable: The host has no address that is allowed.
    """
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    allowed = [each for each in addresses if may_connect(each, hosts)]
    if not allowed:
        raise Undeliverable(
            f"{target.host} has the addresses {', '.join(addresses)}, which are not public;"
            " list them in gateway.webhook_hosts"
        )
    plain = socket.create_connection((allowed[0], target.port), timeout=DEADLINE_S)
    if target.scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(
            plain, server_hostname=target.host, do_handshake_on_connect=False
        )
    except BaseException:
        plain.close()
        raise
