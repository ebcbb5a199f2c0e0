"""`batchery key`: what it prints is settings of the gateway."""

import re
import tomllib

import pytest
from click.testing import CliRunner
from standardwebhooks import Webhook

from batchery.gateway_settings import GatewaySettings
from batchery_producer.cli.serve import key
from batchery_producer.gateway.callers import hash_key


@pytest.mark.parametrize("name", ["shop", "my shop", "a.b", 'x"y'])
def test_settings_of_a_key_hold_for_it_and_sign_its_webhooks(name: str) -> None:
    printed = CliRunner().invoke(key, [name]).output
    said, _, settings = printed.partition("For batchery.toml:\n")
    made = re.search(r"sk-\S+", said)
    assert made
    found = GatewaySettings.model_validate(tomllib.loads(settings)["gateway"]).keys[name]
    assert found.hash == hash_key(made[0])
    assert found.webhook_secret is not None
    assert Webhook(found.webhook_secret)
    assert made[0] not in settings
