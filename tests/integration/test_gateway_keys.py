"""New keys of a running gateway, and what its schema says of them."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import psutil
import pytest
from standardwebhooks import Webhook

from batchery_producer.gateway.callers import make_key, make_webhook_secret
from conftest import StartGateway
from support.gateway import GatewayProcess
from support.harness import Worker, kill_all, wait_for
from support.patience import patient
from support.webhook_receiver import Received, WebhookReceiver

KEY, HASH = make_key()
NEW_KEY, NEW_HASH = make_key()
SECRET = make_webhook_secret()

StartWithKeys = Callable[[Path, str], GatewayProcess]


def write_keys(file: Path, **hashes: str) -> None:
    tables = (
        f'[gateway.keys.{name}]\nhash = "{hashed}"\nwebhook_secret = "{SECRET}"\n'
        for name, hashed in hashes.items()
    )
    file.write_text("".join(tables))


def status(gateway: GatewayProcess, key: str) -> int:
    answer = gateway.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code


@pytest.fixture
def start_with_keys(start_gateway: StartGateway, redis_url: str) -> Iterator[StartWithKeys]:
    """Starts a gateway with a worker beside, whose settings are in a file.

    Both end with the test: a worker of an earlier one would bring the webhooks by which a test
    sees that its own worker runs.
    """
    with contextlib.ExitStack() as stack:

        def start(file: Path, processes: str) -> GatewayProcess:
            gateway = start_gateway(
                *("-A", "apps.shop", "--processes", processes),
                models={},
                gateway={"tasks": ["apps.shop.*"], "webhook_hosts": ["127.0.0.1"], "worker": True},
                environment={
                    "BATCHERY_SETTINGS_FILE": str(file),
                    "CELERY_BROKER_URL": redis_url,
                    "CELERY_RESULT_BACKEND": redis_url,
                },
            )
            stack.callback(kill_all, gateway.process)
            return gateway

        yield start


def post_webhook(gateway: GatewayProcess, key: str) -> Received:
    """Calls with a webhook, and waits for it; returns the request by which it came."""
    with WebhookReceiver(204) as receiver:
        answer = gateway.post(
            "/tasks/apps.shop.shout",
            {"item": "a", "webhook": receiver.url},
            headers={"authorization": f"Bearer {key}"},
        )
        assert answer.is_success, answer.text
        return wait_for(lambda: receiver.received, "a webhook", patient(60))[0]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_new_keys_are_taken_up_at_sighup(
    start_with_keys: StartWithKeys, worker: Worker, tmp_path: Path, processes: str
) -> None:
    file = tmp_path / "batchery.toml"
    write_keys(file, shop=HASH)
    gateway = start_with_keys(file, processes)
    assert (status(gateway, KEY), status(gateway, NEW_KEY)) == (200, 401)
    write_keys(file, shop=HASH, new=NEW_HASH)
    os.kill(gateway.process.pid, signal.SIGHUP)
    # With several processes, each of them in turn.
    wait_for(lambda: {status(gateway, NEW_KEY) for _ in range(20)} == {200}, "the new key")
    assert status(gateway, KEY) == 200
    received = post_webhook(gateway, NEW_KEY)
    Webhook(SECRET).verify(received.body, dict(received.headers))


def find_children(gateway: GatewayProcess) -> set[int]:
    """The processes that serve, and the worker beside."""
    children = psutil.Process(gateway.process.pid).children()
    return {each.pid for each in children if "spawn_main" in " ".join(each.cmdline())}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_mistake_in_the_settings_is_one_line_and_changes_nothing(
    start_with_keys: StartWithKeys, worker: Worker, tmp_path: Path, processes: str
) -> None:
    file = tmp_path / "batchery.toml"
    write_keys(file, shop=HASH)
    gateway = start_with_keys(file, processes)

    post_webhook(gateway, KEY)  # The worker beside runs.
    children, before = find_children(gateway), len(gateway.log)
    write_keys(file, new=NEW_HASH)
    file.write_text(f'{file.read_text()}[gateway]\nport = "x"\n')
    os.kill(gateway.process.pid, signal.SIGHUP)
    wait_for(lambda: "SIGHUP: nothing changes: " in gateway.log, "the log says so")
    assert "gateway.port = 'x'" in lines_after(gateway, before)[0]
    assert (status(gateway, KEY), status(gateway, NEW_KEY)) == (200, 401)
    post_webhook(gateway, KEY)
    assert find_children(gateway) == children
    assert len(lines_after(gateway, before)) == 1

    # Whoever ends meanwhile cannot start; that is said in a line each.
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gateway.log.count("another one starts") > 2, "the third try", patient(60))
    said = re.findall(r"the worker beside ended \((-?\d)\); another one starts", gateway.log)
    assert said[:3] == ["-9", "2", "2"]
    assert "Traceback" not in gateway.log
    assert gateway.process.poll() is None
    write_keys(file, shop=HASH, new=NEW_HASH)
    os.kill(gateway.process.pid, signal.SIGHUP)
    wait_for(lambda: answers(gateway), "the new key", patient(60))
    post_webhook(gateway, NEW_KEY)


def lines_after(gateway: GatewayProcess, before: int) -> list[str]:
    """What it has logged since; a webhook of the test before may have come again to this one."""
    lines = gateway.log[before:].splitlines()
    return [line for line in lines if "webhook of task" not in line]


def answers(gateway: GatewayProcess) -> bool:
    """Whether each process that serves knows the new key."""
    with contextlib.suppress(httpx2.TransportError):
        return {status(gateway, NEW_KEY) for _ in range(20)} == {200}
    return False


def test_schema_has_the_keys_where_there_are_any(start_gateway: StartGateway) -> None:
    keyed = start_gateway(gateway={"keys": {"shop": {"hash": HASH}}})
    schema = keyed.get("/openapi.json", headers={"x-api-key": KEY}).raise_for_status().json()
    assert schema["security"] == [{"bearer": []}, {"header": []}]
    assert schema["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    assert schema["paths"]["/health"]["get"]["security"] == []
    assert "security" not in schema["paths"]["/v1/embeddings"]["post"]
    schema = start_gateway().get("/openapi.json").json()
    assert "security" not in schema
    assert "securitySchemes" not in schema["components"]
