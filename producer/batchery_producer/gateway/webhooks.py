"""Results that are posted to their callers, signed as standardwebhooks.com says.

A webhook is a task of the gateway's own queue (`jobs.py`). The worker of the task whose result it
posts sends it, as a callback; a message of that says all of it. Here is one attempt: where it may
go, and how it is made.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import httpx2
from standardwebhooks import Webhook

from batchery.addresses import NotPublic, is_named, send_checked
from batchery.gateway_settings import GatewaySettings
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store, TaskRecord, TaskRecords, has_ended, to_json

# Where results may be posted to


def find_target(url: str, hosts: Sequence[str]) -> httpx2.URL:
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
        target = httpx2.URL(url).copy_with(fragment=None)
    except httpx2.InvalidURL as error:
        raise _refused(f"is no URL: {error}") from error
    host, port = target.host, 443 if target.port is None else target.port
    if target.scheme not in ("http", "https") or not host or not 0 < port < 65_536:
        raise _refused("expected https://HOST/PATH or http://HOST/PATH")
    if target.userinfo:
        raise _refused("must not have a user or a password; the receiver checks our signature")
    if not is_named(host, hosts):
        raise _refused(f"host {host!r:.100} is not allowed; see the setting gateway.webhook_hosts")
    return target


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


def post(
    target: httpx2.URL, hosts: Sequence[str], body: bytes, message_id: str, secret: str | None
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
    now = datetime.now(UTC)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "batchery",
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now.timestamp())),
    }
    if secret is not None:
        headers["webhook-signature"] = Webhook(secret).sign(message_id, now, body.decode())
    try:
        status = asyncio.run(_post(target, hosts, body, headers))
    except TimeoutError as error:
        raise Undeliverable(f"no answer within {DEADLINE_S:g} s") from error
    except (OSError, httpx2.HTTPError) as error:
        raise Undeliverable(str(error) or type(error).__name__) from error
    if not 200 <= status < 300:
        raise Undeliverable(f"it answered {status}", is_final=status == GONE)


async def _post(
    target: httpx2.URL, hosts: Sequence[str], body: bytes, headers: Mapping[str, str]
) -> int:
    """The status of the answer, whose body is not read."""
    # No proxy of the environment: it would connect to whatever address it finds.
    client = httpx2.AsyncClient(verify=ssl.create_default_context(), trust_env=False)
    async with asyncio.timeout(DEADLINE_S), client:
        try:
            sending = send_checked(
                *(client, "POST", target, hosts),
                headers=headers,
                content=body,
                timeout_s=DEADLINE_S,
            )
            async with sending as answer:
                return int(answer.status_code)
        except NotPublic as error:
            raise Undeliverable(f"{error}; list them in gateway.webhook_hosts") from error


# The webhook of a task


#: Name of the task that posts a result; its arguments are the URL and the record of the other task.
TASK = "batchery.gateway.webhook"

#: Pauses before further attempts, in seconds.
PAUSES_S = (1.0, 5.0, 25.0, 125.0, 625.0)

#: How long it waits for the result, in seconds: stock workers store it just after the callback.
RESULT_WAIT_S = 2.0
RESULT_LOOK_S = 0.05


def post_result(store: Store, settings: GatewaySettings, url: str, record: TaskRecord) -> None:
    """Posts the result of a task, unless its caller has revoked it.

    Raises:
        Undeliverable: It did not arrive.
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
    secret = None if key is None else key.webhook_secret
    post(target, settings.webhook_hosts, to_json(state), record.id, secret)
