"""New keys of a running gateway, and what its schema says of them."""

import base64
import hashlib
import hmac
import os
import signal
from pathlib import Path

import pytest

from batchery_producer.gateway.callers import make_key
from conftest import StartGateway
from support.gateway import GatewayProcess
from support.harness import Worker, wait_for
from support.webhook_receiver import WebhookReceiver

KEY, HASH = make_key()
NEW_KEY, NEW_HASH = make_key()


def write_keys(file: Path, **hashes: str) -> None:
    tables = (f'[gateway.keys.{name}]\nhash = "{hashed}"\n' for name, hashed in hashes.items())
    file.write_text("".join(tables))


def status(gateway: GatewayProcess, key: str) -> int:
    answer = gateway.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    return answer.status_code


@pytest.mark.parametrize("processes", ["1", "2"])
def test_new_keys_are_taken_up_at_sighup(
    start_gateway: StartGateway, worker: Worker, redis_url: str, tmp_path: Path, processes: str
) -> None:
    file = tmp_path / "batchery.toml"
    write_keys(file, shop=HASH)
    gateway = start_gateway(
        *("-A", "apps.shop", "--processes", processes),
        models={},
        gateway={"tasks": ["apps.shop.*"], "webhook_hosts": ["127.0.0.1"]},
        environment={
            "BATCHERY_SETTINGS_FILE": str(file),
            "CELERY_BROKER_URL": redis_url,
            "CELERY_RESULT_BACKEND": redis_url,
        },
    )
    assert (status(gateway, KEY), status(gateway, NEW_KEY)) == (200, 401)
    write_keys(file, shop=HASH, new=NEW_HASH)
    os.kill(gateway.process.pid, signal.SIGHUP)
    # With several processes, each of them in turn.
    wait_for(lambda: {status(gateway, NEW_KEY) for _ in range(20)} == {200}, "the new key")
    assert status(gateway, KEY) == 200
    with WebhookReceiver(204) as receiver:
        answer = gateway.post(
            "/tasks/apps.shop.shout",
            {"item": "a", "webhook": receiver.url},
            headers={"authorization": f"Bearer {NEW_KEY}"},
        )
        assert answer.is_success, answer.text
        received = (wait_for(lambda: receiver.received, "a webhook", 60) or [])[0]
    signed = f"{received.headers['webhook-id']}.{received.headers['webhook-timestamp']}."
    secret = hashlib.sha256(NEW_KEY.encode()).digest()
    digest = hmac.new(secret, signed.encode() + received.body, hashlib.sha256).digest()
    assert received.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


def test_wrong_settings_leave_the_keys_as_they_are(
    start_gateway: StartGateway, tmp_path: Path
) -> None:
    file = tmp_path / "batchery.toml"
    write_keys(file, shop=HASH)
    # Its worker would take the webhooks of other tests, whose keys it does not know.
    gateway = start_gateway(
        gateway={"worker": False}, environment={"BATCHERY_SETTINGS_FILE": str(file)}
    )
    write_keys(file, new="sha256:none")
    os.kill(gateway.process.pid, signal.SIGHUP)
    wait_for(lambda: "SIGHUP: the keys stay as they are: " in gateway.log, "the log says so")
    assert (status(gateway, KEY), status(gateway, NEW_KEY)) == (200, 401)


def test_schema_has_the_keys_where_there_are_any(start_gateway: StartGateway) -> None:
    keyed = start_gateway(gateway={"worker": False, "keys": {"shop": {"hash": HASH}}})
    schema = keyed.get("/openapi.json", headers={"x-api-key": KEY}).raise_for_status().json()
    assert schema["security"] == [{"bearer": []}, {"header": []}]
    assert schema["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    assert schema["paths"]["/health"]["get"]["security"] == []
    assert "security" not in schema["paths"]["/v1/embeddings"]["post"]
    schema = start_gateway(gateway={"worker": False}).get("/openapi.json").json()
    assert "security" not in schema
    assert "securitySchemes" not in schema["components"]
