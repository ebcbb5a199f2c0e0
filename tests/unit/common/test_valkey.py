"""URLs of Valkey, for Celery and for Redis's client."""

import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery import Celery
from celery.backends.redis import RedisBackend

from batchery import AsyncClient, Client, SettingsError, install
from batchery.cli.app import load_app
from batchery.transport import Transport
from batchery.valkey import redis_url


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("valkey://:p@h:1/2", "redis://:p@h:1/2"),
        ("valkeys://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=none"),
        ("valkey://a/0;valkey://b/0", "redis://a/0;redis://b/0"),
        ("redis://valkey://", "redis://valkey://"),
        ("amqp://valkey/0", "amqp://valkey/0"),
    ],
)
def test_valkey_in_a_url_is_spelled_redis(given: str, meant: str) -> None:
    assert redis_url(given) == meant


def test_an_installed_app_takes_a_valkey_as_broker_and_result_backend() -> None:
    url = "valkey://:secret@host:7000/3"
    app = install(Celery(broker=url, backend=url, set_as_current=False))
    backend: Any = app.backend
    known = backend.connparams
    assert type(backend) is RedisBackend
    assert (known["host"], known["port"], known["password"], known["db"]) == (
        "host",
        7000,
        "secret",
        3,
    )
    with app.connection_for_read() as connection:
        assert isinstance(connection.transport, Transport)
        assert not connection.ssl


def test_valkeys_is_with_tls_that_checks_the_certificate() -> None:
    url = "valkeys://host/0?ssl_cert_reqs=CERT_REQUIRED"
    app = install(Celery(broker="valkeys://host/0", backend=url, set_as_current=False))
    backend: Any = app.backend
    assert backend.connparams["connection_class"].__name__ == "SSLConnection"
    with app.connection_for_read() as connection:
        assert isinstance(connection.transport, Transport)
        assert connection.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}


@pytest.mark.parametrize("make", [Client, AsyncClient, partial(load_app, "batchery.app")])
@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost:6379", "redis://localhost:a"])
def test_a_url_that_is_none_is_one_line(make: Callable[[str], object], url: str) -> None:
    with pytest.raises(SettingsError, match="the URL of Redis: "):
        make(url)
