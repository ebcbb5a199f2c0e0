"""`valkey://` and `valkeys://` URLs: Valkey speaks Redis's protocol, and Celery knows no such URL.

`install(app)` makes them known to Celery in this process, as broker and as result backend. Where
Batchery itself is given a URL, it rewrites it. `valkeys://` is with TLS, as `rediss://` is.
"""

import re
import ssl
from typing import Any

import kombu.transport
from celery import Celery
from celery.app import backends
from celery.backends.redis import RedisBackend

from batchery.errors import SettingsError
from batchery.settings import check_broker_url
from batchery.transport import Transport

#: Scheme of a URL, or of one in a list of them; Valkey's are Redis's with another beginning.
SCHEME = re.compile(r"(^|;)\s*valkey(s?)://", re.IGNORECASE)


def redis_url(url: str) -> str:
    """The URL with Redis's scheme in the place of Valkey's; any other URL as it is."""
    return SCHEME.sub(r"\1redis\2://", url)


def given_redis_url(url: str) -> str:
    """The URL of a Redis that a caller has given, as Celery takes it.

    Raises:
        SettingsError: It is none. The text has no URL, as that may have a password.
    """
    try:
        return redis_url(check_broker_url(url))
    except ValueError as error:
        raise SettingsError(f"the URL of Redis: {error}") from None


def use_redis(app: Celery, url: str) -> None:
    """Makes a Redis the app's broker and result backend, whatever its environment names."""
    # `broker_url` and `result_backend` would not do: Celery ranks the variables CELERY_BROKER_URL
    # and CELERY_RESULT_BACKEND above them.
    url = given_redis_url(url)
    app.conf.update(broker_read_url=url, broker_write_url=url)
    app.backend_cls = url


class ValkeyTransport(Transport):
    """The transport of `valkey://` and `valkeys://`."""

    def __init__(self, client: Any, **keywords: Any) -> None:
        # Kombu switches TLS on by the scheme `rediss` alone.
        if client.transport_cls == "valkeys" and not client.ssl:
            client.ssl = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
        super().__init__(client, **keywords)


def valkey_backend(*, url: str | None = None, **keywords: Any) -> RedisBackend:
    """Celery's own Redis backend for a URL of Valkey."""
    return RedisBackend(url=url and redis_url(url), **keywords)


def accept_valkey_urls() -> None:
    """Makes Celery take these URLs in this process."""
    for scheme in ("valkey", "valkeys"):
        kombu.transport.TRANSPORT_ALIASES[scheme] = f"{__name__}:{ValkeyTransport.__name__}"
        backends.BACKEND_ALIASES[scheme] = f"{__name__}:{valkey_backend.__name__}"
