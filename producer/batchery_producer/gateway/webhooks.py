"""Results that are posted to their callers, signed as standardwebhooks.com says.

A webhook is a task of the gateway's own queue (`jobs.py`). The worker of the task whose result it
posts sends it, as a callback; a message of that says all of it. Here is one attempt: where it may
go, and how it is made.
"""

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

import httpcore2
from standardwebhooks import Webhook

from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store, TaskRecord, TaskRecords, has_ended, to_json

# Where results may be posted to


#: Ports by scheme.
PORTS = {"http": 80, "https": 443}

#: Where a network that has IPv6 alone finds the IPv4 address in the last 32 bits.
NAT64 = IPv6Network("64:ff9b::/96")

#: Networks that Python calls global though their addresses may lead to a private one: of IPv4 (two
#: old forms, local NAT64, Teredo, 6to4), or of a site.
HIDING_NETWORKS = (
    *("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48"),
    *("2001::/32", "2002::/16", "fec0::/10"),
)


def find_target(url: str, hosts: Sequence[str]) -> httpcore2.URL:
    """The target of a URL that a caller gives.

    Args:
        url: `https` or `http`.
        hosts: The setting `gateway.webhook_hosts`: names, addresses and networks.

    Raises:
        Problem: It is no URL of these hosts.
    """
    if not hosts:
        raise _refused("none is allowed; see the setting gateway.webhook_hosts")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise _refused("has characters that belong in no URL; write them as %XX")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _refused(f"is no URL: {error}") from error
    host = parts.hostname
    if parts.scheme not in PORTS or not host or port == 0:
        raise _refused("expected https://HOST/PATH or http://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise _refused("must not have a user or a password; the receiver checks our signature")
    address = _address(host)
    names = {each.lower() for each in hosts}
    if not (host in names if address is None else _is_listed(address, hosts)):
        raise _refused(f"host {host!r:.100} is not allowed; see the setting gateway.webhook_hosts")
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return httpcore2.URL(
        scheme=parts.scheme, host=host, port=port or PORTS[parts.scheme], target=path
    )


def may_connect(address: str, hosts: Sequence[str]) -> bool:
    """Whether a host's address may be connected to: a public one, or one that is listed.

    Args:
        address: What the host's name was looked up to.
        hosts: As in `find_target`.
    """
    found = _address(address)
    return found is not None and (_is_public(found) or _is_listed(found, hosts))


def _is_listed(address: IPv4Address | IPv6Address, networks: Iterable[str]) -> bool:
    """Whether an address, or a network that it is in, is listed; names are none."""
    for each in networks:
        with suppress(ValueError):
            if address in ip_network(each, strict=False):
                return True
    return False


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    # A system connects to the IPv4 address that is inside.
    return getattr(found, "ipv4_mapped", None) or found


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if address in NAT64:
        address = IPv4Address(int(address) % 2**32)
    is_hidden = _is_listed(address, HIDING_NETWORKS)
    return address.is_global and not address.is_multicast and not is_hidden


def _refused(why: str) -> Problem:
    return Problem(Kind.INVALID, f"webhook: {why}", param="webhook")


# One attempt


#: How long an attempt may take from its connection to the end of the answer's head, in seconds,
#: however slowly a receiver reads and writes.
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


class CheckedNetwork(httpcore2.AnyIOBackend):
    """Connects to addresses of a host that may be connected to, and to no others."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts

    async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        """Connects to the first address of a host where somebody listens."""
        find = asyncio.get_running_loop().getaddrinfo
        addresses = [str(each[4][0]) for each in await find(host, port, type=socket.SOCK_STREAM)]
        allowed = [each for each in addresses if may_connect(each, self._hosts)]
        if not allowed:
            raise Undeliverable(
                f"{host} has the addresses {', '.join(addresses)}, which are not public; list them"
                " in gateway.webhook_hosts"
            )
        for address in allowed:
            # Somebody may listen at the next one.
            with suppress(httpcore2.NetworkError, TimeoutError):
                async with asyncio.timeout(DEADLINE_S / len(allowed)):
                    return await super().connect_tcp(address, port, *args, **options)
        raise Undeliverable(f"nobody listens at {', '.join(allowed)}, port {port}")


def post(
    target: httpcore2.URL, hosts: Sequence[str], body: bytes, message_id: str, secret: str | None
) -> None:
    """Posts once, and follows no redirect.

    Args:
        target: Where to.
        hosts: The setting `gateway.webhook_hosts`.
        body: JSON.
        message_id: The same for each attempt, so that a receiver knows repetitions.
        secret: What to sign with, `whsec_` and base64; None for no signature.

    Raises:
        Undeliverable: It did not arrive.
    """
    headers = list(_headers(target, body, message_id, secret))
    try:
        status = asyncio.run(_post(target, hosts, body, headers))
    except TimeoutError as error:
        raise Undeliverable(f"no answer within {DEADLINE_S:g} s") from error
    except (OSError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
        raise Undeliverable(str(error) or type(error).__name__) from error
    if not 200 <= status < 300:
        raise Undeliverable(f"it answered {status}", is_final=status == GONE)


async def _post(
    target: httpcore2.URL, hosts: Sequence[str], body: bytes, headers: list[tuple[str, str]]
) -> int:
    """The status of the answer, whose body is not read."""
    tls, network = ssl.create_default_context(), CheckedNetwork(hosts)
    async with (
        asyncio.timeout(DEADLINE_S),
        httpcore2.AsyncConnectionPool(ssl_context=tls, network_backend=network) as pool,
        pool.stream("POST", target, headers=headers, content=body) as answer,
    ):
        return int(answer.status)


def _headers(
    target: httpcore2.URL, body: bytes, message_id: str, secret: str | None
) -> Iterator[tuple[str, str]]:
    now = datetime.now(UTC)
    host = target.host.decode()
    name = f"[{host}]" if ":" in host else host
    is_usual = target.port == PORTS[target.scheme.decode()]
    yield "Host", name if is_usual else f"{name}:{target.port}"
    yield "Content-Type", "application/json"
    yield "User-Agent", "batchery"
    yield "webhook-id", message_id
    yield "webhook-timestamp", str(int(now.timestamp()))
    if secret is not None:
        yield "webhook-signature", Webhook(secret).sign(message_id, now, body.decode())


# The webhook of a task


#: Name of the task that posts a result; its arguments are the URL and the record of the other task.
TASK = "batchery.gateway.webhook"

#: Pauses before further attempts, in seconds.
PAUSES_S = (1.0, 5.0, 25.0, 125.0, 625.0)

#: How many attempts may go to one host at once, and how many of one caller, by all workers.
MAX_PER_HOST = 4
MAX_PER_CALLER = 6

#: After how long an attempt is made again that found no place, in seconds.
BUSY_S = 2.0

#: How long it waits for the result, in seconds: stock workers store it just after the callback.
RESULT_WAIT_S = 2.0
RESULT_LOOK_S = 0.05


class Busy(Exception):
    """As many are posted at once as may be."""


def post_result(store: Store, settings: GatewaySettings, url: str, record: TaskRecord) -> None:
    """Posts the result of a task, unless its caller has revoked it.

    Raises:
        Undeliverable: It did not arrive.
        Busy: It must wait for its turn.
        Problem: Redis is away.
    """
    records, caller = TaskRecords(store), record.caller
    key, known = settings.keys.get(caller), records.read(record.id)
    if known is not None and known.revoked:
        return
    if key is None and settings.keys:
        # A key may be so new that only the gateway knows it by now.
        raise Undeliverable(f"its key {caller!r} is not in the settings of this worker")
    try:
        target = find_target(url, settings.webhook_hosts)
    except Problem as problem:  # The settings have changed.
        raise Undeliverable(problem.message, is_final=True) from problem
    until_s = time.monotonic() + RESULT_WAIT_S
    while not has_ended(state := records.read_state(record)):
        if time.monotonic() >= until_s:
            raise Undeliverable("its result is not stored yet")
        time.sleep(RESULT_LOOK_S)
    limits = {
        # Itself, as a message may come twice.
        store.key("posting", "task", record.id): 1,
        store.key("posting", "host", target.host.decode()): MAX_PER_HOST,
        store.key("posting", "caller", caller): MAX_PER_CALLER,
    }
    secret = None if key is None else key.webhook_secret
    with _places(store, limits):
        post(target, settings.webhook_hosts, to_json(state), record.id, secret)


@contextmanager
def _places(store: Store, limits: Mapping[bytes, int]) -> Iterator[None]:
    """Has a place in each of some sorted sets; raises a `Busy` where one is full."""
    token, now_s, longest_s = secrets.token_hex(8), time.time(), 2 * DEADLINE_S
    with store.client() as client, client.pipeline() as pipe:
        for key in limits:
            pipe.zremrangebyscore(key, "-inf", now_s)
            pipe.zadd(key, {token: now_s + longest_s})
            pipe.expire(key, int(longest_s))
            pipe.zcard(key)
        counts = pipe.execute()[3::4]
    try:
        if any(count > most for count, most in zip(counts, limits.values(), strict=True)):
            raise Busy
        yield
    finally:
        store.call(lambda client: [client.zrem(key, token) for key in limits])
