"""URLs of brokers: whether one is any, and how an app gets one that a caller gives."""

from urllib.parse import urlsplit

from celery import Celery

from batchery.errors import SettingsError

#: Schemes of URLs that name no broker.
NO_BROKER = ("http", "https", "ws", "wss", "tcp", "ftp", "file")


def check_broker_url(url: str) -> str:
    """Returns the URL of a broker, or several with semicolons between, as Celery takes them.

    Raises:
        ValueError: It is none.
    """
    for part in url.split(";"):
        parts = urlsplit(part.strip())
        if not (parts.scheme and "://" in part) or parts.scheme in NO_BROKER:
            raise ValueError("it is no URL of a broker; write it as redis://localhost:6379/0")
        # A socket's path may hold anything; a port that is no number raises here.
        _ = parts.scheme.endswith(("unix", "socket")) or parts.port
    return url


def use_redis(app: Celery, url: str) -> None:
    """Makes a Redis the app's broker and result backend, whatever its environment names.

    Raises:
        SettingsError: The URL is none. The text does not have it, as it may have a password.
    """
    try:
        check_broker_url(url)
    except ValueError as error:
        raise SettingsError(f"the URL of Redis: {error}") from None
    # `broker_url` and `result_backend` would not do: Celery ranks the variables CELERY_BROKER_URL
    # and CELERY_RESULT_BACKEND above them.
    app.conf.update(broker_read_url=url, broker_write_url=url)
    app.backend_cls = url
