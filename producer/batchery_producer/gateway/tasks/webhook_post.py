"""Posts a result to the URL that its caller named, signed as standardwebhooks.com says."""

import base64
import hashlib
import hmac
import http.client
import socket
import ssl
from collections.abc import Sequence

from batchery_producer.gateway.tasks.webhook_target import WebhookTarget, may_connect

#: How long a receiver may take for each step, in seconds.
TIMEOUT_S = 10.0

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


def secret_of(key_hash: str) -> bytes:
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
    connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    try:
        # Connected here, so that it goes to an address that was checked.
        connection.sock = _connected(target, hosts)
        connection.request("POST", target.path, body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise Undeliverable(str(error) or type(error).__name__) from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise Undeliverable(f"it answered {status}", is_final=status == GONE)


def _connected(target: WebhookTarget, hosts: Sequence[str]) -> socket.socket:
    """A connection to an allowed address of the host.

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
    plain = socket.create_connection((allowed[0], target.port), timeout=TIMEOUT_S)
    if target.scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise
