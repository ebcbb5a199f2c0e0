"""The Celery app that a command line names."""

from collections.abc import Callable
from typing import Any

import click
from celery import Celery
from celery.app.utils import find_app
from celery.backends.base import DisabledBackend

from batchery.announcement import find_announcement
from batchery.cli.redis_check import TIMEOUT_S, check_redis
from batchery.errors import AppNotImportable, SettingsError, StartError
from batchery.settings import names_celery_urls
from batchery.valkey import given_redis_url
from batchery.valkey import redis_url as as_redis

#: Serves the models of the settings.
DEFAULT_APP = "batchery.app"

#: URLs of other brokers and backends are left to Celery.
REDIS_SCHEMES = (
    *("redis://", "rediss://", "redis+socket://", "unix://"),
    *("valkey://", "valkeys://"),
)


def app_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `-A` and `--redis`, which it gets as `app_path` and `redis_url`."""
    app = click.option("-A", "--app", "app_path", default=DEFAULT_APP, help="Celery app to use.")
    redis = click.option("--redis", "redis_url", metavar="URL", help="Redis of the default app.")
    return app(redis(command))


def timeout_option(default_s: float, text: str) -> Callable[[Callable[..., Any]], Any]:
    """Gives a command that asks the app's workers `--timeout`, which it gets as `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=default_s,
        metavar="SECONDS",
        help=text,
    )


def load_app(path: str, redis_url: str | None = None) -> Celery:
    """Imports a Celery app, as `celery -A` does.

    Args:
        path: Such as `shop` or `shop.tasks:app`.
        redis_url: Overrides broker and result backend of the default app.

    Raises:
        AppNotImportable: It cannot be imported, or is no Celery app.
        SettingsError: A Redis is given for another app than the default one.
    """
    if redis_url is not None and path != DEFAULT_APP:
        raise SettingsError("--redis is for the default app; set the broker of yours in its code")
    try:
        app = find_app(path)
    except Exception as error:
        raise AppNotImportable(
            f"app {path!r} cannot be imported: {type(error).__name__}: {error};"
            " name it as for `celery -A`, in the directory where it is"
        ) from error
    if not isinstance(app, Celery):
        raise AppNotImportable(f"app {path!r} is a {type(app).__name__}, and no Celery app")
    if redis_url is not None:
        use_redis(app, redis_url)
    elif path != DEFAULT_APP:
        _use_running(app, path)
    return app


def _use_running(app: Celery, path: str) -> None:
    """Uses the Redis of a `batchery up` in this folder, if it serves this app.

    The default app finds it by itself. As for a worker, the environment's choice comes first.
    """
    running = find_announcement()
    if running is not None and running.app == path and not names_celery_urls():
        use_redis(app, running.redis_url)


def use_redis(app: Celery, url: str) -> None:
    """Makes a Redis the app's broker and result backend, whatever its environment names.

    Raises:
        SettingsError: It is no URL.
    """
    # `broker_url` and `result_backend` would not do: Celery ranks the variables CELERY_BROKER_URL
    # and CELERY_RESULT_BACKEND above them.
    url = given_redis_url(url)
    app.conf.update(broker_read_url=url, broker_write_url=url)
    app.backend_cls = url


def check_broker(app: Celery) -> None:
    """Makes sure that the app's broker answers.

    Raises:
        RedisUnavailable: No Redis answers.
        StartError: No other broker answers.
    """
    with app.connection_for_read() as broker:
        url = broker.as_uri(include_password=True)
        if url.startswith(REDIS_SCHEMES):
            # Celery has moved the TLS options from the URL here, or found them in a setting.
            tls = broker.ssl if isinstance(broker.ssl, dict) else {}
            check_redis(_with_tls(as_redis(url), tls), tls=tls)
            return
        try:
            broker.ensure_connection(max_retries=1, timeout=int(TIMEOUT_S))
        except Exception as error:
            raise StartError(f"no broker at {broker.as_uri()}: {error}") from error


def check_backend(app: Celery) -> None:
    """Makes sure that there is a result backend, and that it answers if it is a Redis.

    Raises:
        RedisUnavailable: It does not answer.
        SettingsError: The app has none.
    """
    if isinstance(app.backend, DisabledBackend):
        raise SettingsError(
            f"app {app.main!r} has no result backend; set result_backend to a Redis URL"
        )
    url = str(getattr(app.backend, "url", None) or "")
    if url.startswith(REDIS_SCHEMES):
        known: dict[str, Any] = getattr(app.backend, "connparams", {})
        tls = {name: value for name, value in known.items() if name.startswith("ssl_")}
        check_redis(_with_tls(url, tls), tls=tls)


def _with_tls(url: str, tls: dict[str, Any]) -> str:
    """Makes a URL say that TLS is on: Celery keeps that in settings, and spells options its way."""
    return url.partition("?")[0].replace("redis://", "rediss://", 1) if tls else url
