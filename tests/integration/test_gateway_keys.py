"""Keys of a gateway: webhooks that they sign, and what its schema says of them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

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
SECRET = make_webhook_secret()

StartWithKeys = Callable[[Path], GatewayProcess]


def write_keys(file: Path, **hashes: str) -> None:
    tables = (
        f'[gateway.keys.{name}]\nhash = "{hashed}"\nwebhook_secret = "{SECRET}"\n'
        for name, hashed in hashes.items()
    )
    file.write_text("".join(tables))


@pytest.fixture
def start_with_keys(start_gateway: StartGateway, redis_url: str) -> Iterator[StartWithKeys]:
    """Starts a gateway with a worker beside, whose settings are in a file.

    Both end with the test: a worker of an earlier one would bring the webhooks by which a test
    sees that its own worker runs.
    """
    with contextlib.ExitStack() as stack:

        def start(file: Path) -> GatewayProcess:
            gateway = start_gateway(
                *("-A", "apps.shop"),
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


def test_worker_beside_that_was_killed_is_replaced(
    start_with_keys: StartWithKeys, worker: Worker, tmp_path: Path
) -> None:
    file = tmp_path / "batchery.toml"
    write_keys(file, shop=HASH)
    gateway = start_with_keys(file)
    post_webhook(gateway, KEY)
    children = psutil.Process(gateway.process.pid).children()
    (beside,) = [each for each in children if "spawn_main" in " ".join(each.cmdline())]
    beside.kill()
    ended = "the worker beside ended (-9); another one starts"
    wait_for(lambda: ended in gateway.log, "another one", patient(60))
    received = post_webhook(gateway, KEY)
    Webhook(SECRET).verify(received.body, dict(received.headers))


def test_schema_has_the_keys_where_there_are_any(start_gateway: StartGateway) -> None:
    keyed = start_gateway(gateway={"keys": {"shop": {"hash": HASH}}})
    schema = (
        keyed.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"})
        .raise_for_status()
        .json()
    )
    assert schema["paths"]["/v1/embeddings"]["post"]["security"] == [{"HTTPBearer": []}]
    schemes = schema["components"]["securitySchemes"]
    assert schemes == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    schema = start_gateway().get("/openapi.json").json()
    assert "securitySchemes" not in schema["components"]
