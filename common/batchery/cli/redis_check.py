"""Checks that a Redis answers, before anything is started or sent: a wrong URL costs one line."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.retry import Retry

from batchery.errors import RedisUnavailable
from batchery.valkey import redis_url

#: How long a Redis may take to answer, in seconds; the network's own timeouts are minutes.
TIMEOUT_S = 5.0


def check_redis(
    url: str, timeout_s: float = TIMEOUT_S, tls: Mapping[str, Any] | None = None
) -> None:
    """Makes sure that a Redis answers.

    Args:
        url: A URL as Celery takes it: `redis://`, `rediss://`, `valkey://`, `valkeys://`,
            `redis+socket://` or `unix://`. A `sentinel://` URL is not checked: Celery itself finds
            the server behind it.
        timeout_s: How long the Redis may take to answer, in seconds.
        tls: Options of the Redis client that are not in the URL, such as `ssl_ca_certs`.

    Raises:
        RedisUnavailable: It does not answer. The text names the URL, without its password, and what
            to do.
    """
    if url.startswith("sentinel://"):
        return
    try:
        with connect(url, timeout_s, tls) as client:
            client.ping()
    except BusyLoadingError:
        return  # It is there, and serves once it has read its data.
    except (RedisError, OSError, ValueError) as error:
        raise RedisUnavailable(
            f"no Redis at {masked(url)}: {_reason(error)}; {_advice(error)}"
        ) from error


def masked(url: str) -> str:
    """The URL without its password, for people; works for malformed URLs, too."""
    return re.sub(r"(password=)[^&]*", r"\1**", re.sub(r"(://[^:@/]*):.*@", r"\1:**@", url))


def connect(url: str, timeout_s: float = TIMEOUT_S, tls: Mapping[str, Any] | None = None) -> Redis:
    """A client that answers or fails at once, without the library's usual retries.

    Raises:
        ValueError: The URL is not one of Redis.
    """
    return Redis.from_url(
        _for_redis(url),
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        **(tls or {}),
    )


def _for_redis(url: str) -> str:
    """Rewrites a URL from Celery's way, or Valkey's, to that of the Redis client."""
    if not url.startswith("redis+socket://"):
        return redis_url(url)
    parts = urlsplit(url)
    database = parse_qs(parts.query).get("virtual_host", ["0"])[0].strip("/")
    password = f":{parts.password}@" if parts.password else ""
    return f"unix://{password}{unquote(parts.path)}?db={database or 0}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _advice(error: Exception) -> str:
    if isinstance(error, AuthenticationError) or "NOAUTH" in str(error):
        return "check user and password: redis://:PASSWORD@HOST:PORT/0"
    if isinstance(error, ValueError):
        return "write it as redis://HOST:PORT/0"
    return "start one there, give another URL, or let `batchery up` run a private one"
