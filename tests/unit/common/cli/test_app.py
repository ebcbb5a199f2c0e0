"""The app that a command line names, and URLs that nobody can use."""

from collections.abc import Callable
from functools import partial

import pytest
from celery import Celery

from apps import shop
from batchery import AsyncClient, Client
from batchery.cli.app import check_backend, check_broker, check_redis, load_app, masked
from batchery.errors import AppNotImportable, SettingsError


def test_an_app_is_found_as_celery_finds_it() -> None:
    assert load_app("apps.shop") is shop.app
    assert load_app("apps.shop:app") is shop.app


@pytest.mark.parametrize("path", ["no_such_module_of_test", "apps.shop:shout"])
def test_object_that_is_no_app_is_refused_with_one_error(path: str) -> None:
    with pytest.raises(AppNotImportable, match=path):
        load_app(path)


def test_a_redis_is_for_the_default_app_alone() -> None:
    with pytest.raises(SettingsError, match="--redis"):
        load_app("apps.shop", "redis://localhost:1/0")


def test_an_app_without_a_result_backend_is_one_error() -> None:
    with pytest.raises(SettingsError, match="has no result backend"):
        check_backend(Celery("silent", set_as_current=False))


@pytest.mark.parametrize("url", ["reddis://h", "no.such://h", "redis://h:99999", "redis://[::1"])
def test_a_url_that_celery_cannot_use_is_one_error(url: str) -> None:
    app = Celery(broker=url, backend=url, set_as_current=False)
    for check, setting in ((check_broker, "broker_url"), (check_backend, "result_backend")):
        with pytest.raises(SettingsError, match=f"^{setting} cannot be used: "):
            check(app)


@pytest.mark.parametrize("url", ["http://localhost", "localhost:6379", "", "redis://h:port/0"])
@pytest.mark.parametrize(
    "make", [check_redis, Client, AsyncClient, partial(load_app, "batchery.app")]
)
def test_a_url_that_is_none_is_one_line(make: Callable[[str], object], url: str) -> None:
    with pytest.raises(SettingsError, match="the URL of Redis: "):
        make(url)


def test_other_brokers_and_backends_and_sentinels_are_left_to_celery() -> None:
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    check_broker(app)
    check_backend(app)
    check_redis("sentinel://127.0.0.1:1;sentinel://127.0.0.1:2")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p@ss/word@host:1/0", "redis://:**@host:1/0"),
        ("rediss://user:secret@host", "rediss://user:**@host"),
        ("unix:///path?db=1&password=secret", "unix:///path?db=1&password=**"),
        ("redis://host:1/0", "redis://host:1/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert masked(url) == shown
