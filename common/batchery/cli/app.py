"""The Celery app that a command line names, and whether its Redis answers.

That is checked before anything is started or sent: a wrong URL costs one line.
"""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import click
from celery import Celery
from celery.app.utils import find_app
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.exceptions import ImproperlyConfigured
from redis import ConnectionPool, Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, RedisError
from redis.retry import Retry

from batchery.broker_url import is_cluster
from batchery.errors import AppNotImportable, RedisUnavailable, SettingsError, StartError
from batchery.installation import use_redis
from batchery.shards import Shard, list_shards
from batchery.transport.worker_registry import require_supported, server_info

#: Serves the models of the settings.
DEFAULT_APP = "batchery.app"

#: How long a Redis may take to answer, in seconds; the network's own timeouts are minutes.
TIMEOUT_S = 5.0


#: What an option may be that is a time in seconds: up to thirty years, which all clocks can add.
SECONDS = click.FloatRange(0, 10**9, min_open=True)


def app_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `-A` and `--redis`, which it gets as `app_path` and `redis_url`."""
    app = click.option("-A", "--app", "app_path", default=DEFAULT_APP, help="Celery app to use.")
    redis = click.option("--redis", "redis_url", metavar="URL", help="Redis of the default app.")
    return app(redis(command))


def with_app(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command `-A` and `--redis`, and calls it with the app that they name, as `app`."""

    @functools.wraps(command)
    def load_and_call(app_path: str, redis_url: str | None, **options: Any) -> Any:
        return command(app=load_app(app_path, redis_url), **options)

    return app_options(load_and_call)


def timeout_option(default_s: float, text: str) -> Callable[[Callable[..., Any]], Any]:
    """Gives a command that asks the app's workers `--timeout`, which it gets as `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=SECONDS,
        default=default_s,
        metavar="SECONDS",
        help=text,
    )


def load_app(path: str, redis_url: str | None = None, *, with_tasks: bool = False) -> Celery:
    """Imports a Celery app, as `celery -A` does.

    Args:
        path: Such as `shop` or `shop.tasks:app`.
        redis_url: Overrides broker and result backend of the default app; that of a cluster
            overrides where its batch jobs and results are.
        with_tasks: Also import the modules of its tasks, as a worker does: they name its queues.

    Raises:
        AppNotImportable: It cannot be imported, or is no Celery app.
        SettingsError: A Redis is given for another app than the default one.
        StartError: What a module of its tasks raises of these.
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
    if with_tasks:
        try:
            app.loader.import_default_modules()
        except StartError:
            raise
        except Exception as error:
            raise AppNotImportable(
                f"app {path!r}: its tasks cannot be imported: {type(error).__name__}: {error}"
            ) from error
    return app


def check_broker(app: Celery, timeout_s: float = TIMEOUT_S) -> None:
    """Makes sure that the app's broker answers, and all other places of its jobs.

    Args:
        app: The app.
        timeout_s: How long a Redis may take to answer, in seconds; it is asked twice.

    Raises:
        SettingsError: The URL is none that Celery can use.
        StartError: One does not answer. The text names the URL, without its password.
    """
    for shard in dict.fromkeys((Shard(), *list_shards(app))):
        check_shard(app, shard, timeout_s)


def check_shard(app: Celery, shard: Shard, timeout_s: float = TIMEOUT_S) -> None:
    """Makes sure that one place of jobs answers; arguments and errors as for `check_broker`."""
    with url_errors("broker_url"):
        connection = shard.connect(app)
    with connection as broker:
        is_redis = broker.transport.driver_type == "redis"
        if is_redis:
            limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout_s)
            cast(dict[str, Any], broker.transport_options).update(limits)
        try:
            broker.ensure_connection(max_retries=1, interval_start=0, timeout=int(TIMEOUT_S))
            if is_redis and not is_cluster(shard.url):
                channel: Any = broker.default_channel
                require_supported(server_info(channel.client, "server"))
        except StartError:
            raise
        except Exception as error:
            if isinstance(error.__cause__, BusyLoadingError):
                return  # It is there, and serves once it has read its data.
            if is_redis:
                url = shard.url or broker.as_uri(include_password=True)
                raise _no_redis(masked(url), error) from error
            raise StartError(f"no broker at {broker.as_uri()}: {error}") from error


def check_backend(app: Celery) -> None:
    """Makes sure that there is a result backend, and that it answers if it is a Redis.

    A Sentinel is not asked: Celery itself finds the server behind it.

    Raises:
        SettingsError: The app has none, or one that Celery cannot use.
        RedisUnavailable: It does not answer.
    """
    with url_errors("result_backend"):
        backend: Any = app.backend
    if isinstance(backend, DisabledBackend):
        raise SettingsError(
            f"app {app.main!r} has no result backend; set result_backend to a Redis URL"
        )
    kind: type = type(backend)
    if kind is not RedisBackend:
        return
    limits = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), TIMEOUT_S)
    pool = ConnectionPool(**{**backend.connparams, **limits, "retry": Retry(NoBackoff(), 0)})
    try:
        with Redis.from_pool(pool) as client:
            client.ping()
    except BusyLoadingError:
        return
    except (RedisError, OSError) as error:
        raise _no_redis(masked(str(backend.url)), error) from error


def check_redis(url: str) -> None:
    """Makes sure that the Redis at a URL of Celery's answers; a Sentinel is not asked.

    Raises:
        SettingsError: It is no URL.
        RedisUnavailable: It does not answer.
    """
    if not url.startswith("sentinel://"):
        app = Celery(set_as_current=False)
        use_redis(app, url)
        check_broker(app)


@contextmanager
def url_errors(setting: str) -> Iterator[None]:
    """Raises that a URL is none, or that Celery has no class for it, or not what that imports."""
    try:
        yield
    except (LookupError, ValueError, ImportError, ImproperlyConfigured) as error:
        raise SettingsError(f"{setting} cannot be used: {error.args[0]}") from error


def _no_redis(url: str, error: Exception) -> RedisUnavailable:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    advice = "start one there, give another URL, or let `batchery up` run a private one"
    if isinstance(error.__cause__ or error, AuthenticationError):
        advice = "check user and password: redis://:PASSWORD@HOST:PORT/0"
    return RedisUnavailable(f"no Redis at {url}: {text}; {advice}")


def masked(url: str) -> str:
    """The URL without its password, for people; works for malformed URLs, too."""
    return re.sub(r"(password=)[^&]*", r"\1**", re.sub(r"(://[^:@/]*):.*@", r"\1:**@", url))
