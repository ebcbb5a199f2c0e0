"""Results that are posted to their callers: each attempt is a job of the gateway's own queue.

The task itself brings it on its way, by a callback that its worker sends with the result. What
fails is due again after a pause. So nobody waits, and whoever is killed loses nothing: a webhook
comes at least once, or is given up after its last attempt.
"""

import base64
import hashlib
import hmac
import http.client
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import orjson
from celery import states

from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import LOST_S, WEBHOOK, JobQueue, Store
from batchery_producer.gateway.task_records import TaskRecord, TaskRecords, TaskState, to_json

# Where results may be posted to


#: Ports by scheme.
PORTS = {"http": 80, "https": 443}


#: Where a network that has IPv6 alone finds the IPv4 address in the last 32 bits.
NAT64 = IPv6Network("64:ff9b::/96")

#: Networks that Python calls global though their addresses may lead to a private one: of IPv4 (two
#: old forms, local NAT64, Teredo, 6to4), or of a site.
HIDING_NETWORKS = tuple(
    map(
        IPv6Network,
        ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10"),
    )
)


class WebhookTarget(NamedTuple):
    """A URL that was checked.

    Attributes:
        scheme: `http` or `https`.
        host: Name or address, in lower case.
        port: Port.
        path: Path and query, with a slash at the beginning.
    """

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """What the header `Host` says."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"


def resolve_target(url: str, hosts: Sequence[str]) -> WebhookTarget:
    """The target of a URL.

    Args:
        url: What a caller gives.
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
    if parts.scheme not in PORTS or not parts.hostname:
        raise _refused("expected https://HOST/PATH or http://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise _refused("must not have a user or a password; the receiver checks our signature")
    if port == 0:
        raise _refused("has port 0")
    host = parts.hostname
    address = _address(host)
    is_listed = (
        host in {each.lower() for each in hosts} if address is None else is_inside(address, hosts)
    )
    if not is_listed:
        raise _refused(f"host {host!r:.100} is not allowed; see the setting gateway.webhook_hosts")
    path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    return WebhookTarget(parts.scheme, host, port or PORTS[parts.scheme], path)


def may_connect(address: str, hosts: Sequence[str]) -> bool:
    """Whether a host's address may be connected to: a public one, or one that is listed.

    Args:
        address: What the host's name was looked up to.
        hosts: As in `resolve_target`.
    """
    found = _address(address)
    if found is None:
        return False
    return _is_public(found) or is_inside(found, hosts)


def is_inside(address: IPv4Address | IPv6Address, hosts: Sequence[str]) -> bool:
    """Whether an address, or a network that it is in, is listed."""
    networks = [network for each in hosts if (network := _network(each)) is not None]
    return any(address.version == each.version and address in each for each in networks)


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
    is_hidden = any(address in each for each in HIDING_NETWORKS)
    return address.is_global and not address.is_multicast and not is_hidden


def _network(text: str) -> IPv4Network | IPv6Network | None:
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


def _refused(why: str) -> Problem:
    return Problem(Kind.INVALID, f"webhook: {why}", param="webhook")


# One attempt, signed as standardwebhooks.com says


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
    timeout_s, plain = DEADLINE_S / len(allowed), None
    while plain is None:
        try:
            plain = socket.create_connection((allowed.pop(0), target.port), timeout=timeout_s)
        except OSError:  # Somebody may listen at another one.
            if not allowed:
                raise
    plain.settimeout(DEADLINE_S)
    if target.scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(
            plain, server_hostname=target.host, do_handshake_on_connect=False
        )
    except BaseException:
        plain.close()
        raise


# All attempts


logger = logging.getLogger(__name__)

#: Pauses before further attempts, in seconds.
PAUSES_S = (1.0, 5.0, 25.0, 125.0, 625.0)

#: How many attempts may go to one host at once, and how many of one caller, by all workers.
MAX_PER_HOST = 4
MAX_PER_CALLER = 6

#: After how long an attempt is made again that found no place, in seconds.
BUSY_S = 2.0

#: How long a callback waits for its result, in seconds: stock workers store it just afterwards.
RESULT_WAIT_S = 2.0

#: How often it looks meanwhile, in seconds.
RESULT_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Webhook:
    """A promise to post a result.

    Attributes:
        url: Where to.
        record: Of the task.
        attempts: How often it was tried.
    """

    url: str
    record: TaskRecord
    attempts: int = 0

    def packed(self) -> bytes:
        """As it is kept."""
        return orjson.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: bytes) -> "Webhook":
        """As it was."""
        known = orjson.loads(text)
        return cls(known["url"], TaskRecord(**known["record"]), known["attempts"])


class Webhooks:
    """The webhooks of all gateways' tasks."""

    def __init__(
        self, store: Store, records: TaskRecords, jobs: JobQueue, settings: GatewaySettings
    ) -> None:
        self._store = store
        self._records = records
        self._jobs = jobs
        self._settings = settings

    def add(self, url: str, record: TaskRecord) -> None:
        """Keeps a webhook, before its task is sent."""
        packed, lifetime_s = Webhook(url, record).packed(), self._records.lifetime_s
        with self._store.client() as client, client.pipeline() as pipe:
            pipe.set(self._key(record.id), packed, ex=lifetime_s)
            pipe.zadd(self._jobs.due_key, {_work(record.id): time.time() + LOST_S})
            pipe.execute()

    def callback(self, task_id: str, tenant: str | None) -> Any:
        """What the task's worker sends when the task has ended."""
        return self._jobs.callback(_work(task_id), RESULT_WAIT_S, tenant=tenant)

    def forget(self, task_id: str) -> None:
        """Posts nothing more."""
        self._store.call(lambda client: client.delete(self._key(task_id)))
        self._jobs.forget(_work(task_id))

    def ended(self, task_ids: Sequence[str]) -> list[str]:
        """Those of some tasks that have a result, or whose webhook is over."""
        with self._store.client() as client, client.pipeline(transaction=False) as pipe:
            for each in task_ids:
                pipe.exists(self._store.backend.get_key_for_task(each))
                pipe.exists(self._key(each))
            there: list[int] = pipe.execute()
        return [
            task_id
            for task_id, has_result, is_kept in zip(task_ids, there[::2], there[1::2], strict=True)
            if has_result or not is_kept
        ]

    def attempt(self, task_id: str, wait_s: float = 0.0) -> None:
        """Posts a result, if there is one and it is still wanted.

        Args:
            task_id: Of the task.
            wait_s: How long to wait for the result, in seconds.
        """
        work = _work(task_id)
        webhook = self._load(task_id)
        if webhook is None:
            self._jobs.forget(work)
            return
        self._jobs.postpone(work)
        state = self._state(webhook.record, wait_s)
        # Its caller may have revoked the task meanwhile.
        if state["status"] not in states.READY_STATES or self._load(task_id) is None:
            return
        try:
            self._post_once(webhook, to_json(state))
        except Undeliverable as error:
            self._failed(webhook, error)

    def _state(self, record: TaskRecord, wait_s: float) -> TaskState:
        until_s = time.monotonic() + wait_s
        while True:
            state = self._records.read_state(record)
            if state["status"] in states.READY_STATES or time.monotonic() >= until_s:
                return state
            time.sleep(RESULT_LOOK_S)

    def _load(self, task_id: str) -> Webhook | None:
        found = self._store.call(lambda client: client.get(self._key(task_id)))
        return None if found is None else Webhook.unpacked(found)

    def _post_once(self, webhook: Webhook, body: bytes) -> None:
        """Posts, unless as many are posted at once as may be.

        Raises:
            Undeliverable: It did not arrive.
        """
        hosts, caller = self._settings.webhook_hosts, webhook.record.caller
        key = self._settings.keys.get(caller)
        if key is None and self._settings.keys:
            # A key may be so new that only the gateway knows it by now.
            raise Undeliverable(f"its key {caller!r} is not in the settings of this worker")
        try:
            target = resolve_target(webhook.url, hosts)
        except Problem as problem:  # The settings have changed.
            raise Undeliverable(problem.message, is_final=True) from problem
        secret = None if key is None else derive_secret(key.hash)
        task_id = webhook.record.id
        limits = {
            # Itself, as a message may come twice.
            self._store.key("posting", "task", task_id): 1,
            self._store.key("posting", "host", target.host): MAX_PER_HOST,
            self._store.key("posting", "caller", caller): MAX_PER_CALLER,
        }
        with self._places(limits) as are_free:
            if not are_free:
                self._jobs.postpone(_work(task_id), BUSY_S)
                return
            post(target, hosts, body, task_id, int(time.time()), secret)
            self.forget(task_id)

    @contextmanager
    def _places(self, limits: dict[bytes, int]) -> Iterator[bool]:
        """Places in some sets; says whether there are any."""
        token = secrets.token_hex(8)
        keys = list(limits)
        if not self._store.script("take_places", keys, token, 2 * DEADLINE_S, *limits.values()):
            yield False
            return
        try:
            yield True
        finally:
            self._store.call(lambda client: [client.zrem(key, token) for key in keys])

    def _failed(self, webhook: Webhook, error: Undeliverable) -> None:
        task_id = webhook.record.id
        where = f"webhook of task {task_id} to {webhook.url}"
        if error.is_final or webhook.attempts >= len(PAUSES_S):
            logger.error("%s is given up: %s", where, error)
            self.forget(task_id)
            return
        pause_s = PAUSES_S[webhook.attempts]
        logger.warning("%s failed, again in %g s: %s", where, pause_s, error)
        tried = replace(webhook, attempts=webhook.attempts + 1).packed()
        key = self._key(task_id)
        self._store.call(lambda client: client.set(key, tried, keepttl=True, xx=True))
        self._jobs.postpone(_work(task_id), pause_s)

    def _key(self, task_id: str) -> bytes:
        return self._store.key("webhook", task_id)


def _work(task_id: str) -> str:
    return f"{WEBHOOK} {task_id}"
