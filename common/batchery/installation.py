"""What `install(app)` remembers of an app: its settings, and what is made of them once."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery

from batchery.broker_url import check_broker_url, find_database, is_cluster
from batchery.cluster_backend import use_cluster_results
from batchery.errors import SettingsError, StartError
from batchery.media_settings import MediaSettings
from batchery.queue_limits import QueueLimits
from batchery.settings import Settings


class Installation:
    """What `install` remembers of one app."""

    def __init__(self, app: Celery, keywords: Mapping[str, Any]) -> None:
        self._app = app
        self._keywords = keywords
        #: Why the models of the settings could not be registered; a worker stops with it.
        self.error: StartError | None = None

    @cached_property
    def settings(self) -> Settings:
        """The app's settings, read once, at first use."""
        return Settings.load(self._app.conf, **self._keywords)

    @cached_property
    def redis_url(self) -> str | None:
        """The Redis with the queues of batch jobs, if it is not the app's broker."""
        try:
            url = self.settings.redis_url
        except SettingsError:
            # A worker stops with it. A producer sends its jobs nevertheless.
            return None
        conf = self._app.conf
        brokers = filter(None, (conf.broker_url, conf.broker_read_url, conf.broker_write_url))
        # Celery cannot use a cluster, so one is no broker even where it is named as such.
        if url is None or is_cluster(url):
            return url
        return None if find_database(url) in map(find_database, brokers) else url

    @cached_property
    def queue_limits(self) -> QueueLimits | None:
        """The limits of the priority classes; None if no class has any."""
        try:
            limits = QueueLimits(self.settings.classes)
        except SettingsError:
            # A worker stops with it. A producer sends its jobs nevertheless.
            return None
        return limits if limits.exist else None


_installations: WeakKeyDictionary[Celery, Installation] = WeakKeyDictionary()

#: What `use_redis` has chosen, above all settings; None is the app's broker.
_chosen: WeakKeyDictionary[Celery, str | None] = WeakKeyDictionary()


def remember(app: Celery, keywords: Mapping[str, Any]) -> None:
    """Remembers that `install` was called with an app and these settings."""
    _installations[app] = Installation(app, keywords)


def get_installation(app: Celery) -> Installation:
    """What `install` made of this app.

    Raises:
        SettingsError: `install` was never called with it.
    """
    try:
        return _installations[app]
    except KeyError:
        raise SettingsError(f"app {app.main!r}: call batchery.install(app) first") from None


def get_queue_limits(app: Celery) -> QueueLimits | None:
    """The limits of an app's priority classes; None if it has none, or `install` never saw it."""
    found = _installations.get(app)
    return None if found is None else found.queue_limits


def get_redis_url(app: Celery) -> str | None:
    """The Redis with the queues of an app's batch jobs; None if these are with its broker."""
    if app in _chosen:
        return _chosen[app]
    found = _installations.get(app)
    return None if found is None else found.redis_url


def use_redis(app: Celery, url: str) -> None:
    """Puts an app's batch jobs and results into a Redis, whatever its environment names.

    One server, or Sentinel, becomes the app's broker, too. A cluster does not: the broker stays
    what it is. Ordinary tasks go there, and so do orders to workers, such as to revoke a job.

    Raises:
        SettingsError: The URL is none. The text does not have it, as it may have a password.
    """
    try:
        check_broker_url(url)
    except ValueError as error:
        raise SettingsError(f"the URL of Redis: {error}") from None
    use_cluster_results(app)
    app.backend_cls = url
    _chosen[app] = url if is_cluster(url) else None
    if not is_cluster(url):
        # `broker_url` and `result_backend` would not do: Celery ranks the variables
        # CELERY_BROKER_URL and CELERY_RESULT_BACKEND above them.
        app.conf.update(broker_read_url=url, broker_write_url=url)


def get_media_settings(app: Celery) -> MediaSettings:
    """The limits of pictures and sound of an app; the usual ones if `install` never saw it."""
    found = _installations.get(app)
    return MediaSettings() if found is None else found.settings.media
