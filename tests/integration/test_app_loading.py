"""The app that a command line names."""

import ssl
from pathlib import Path

import pytest
from celery import Celery

from apps import shop
from batchery import install
from batchery.cli.app import check_backend, check_broker, load_app, use_redis
from batchery.errors import AppNotImportable, RedisUnavailable, SettingsError
from batchery_worker.devstack.redis_server import free_port
from support.own_redis import OwnRedis
from support.redis_places import behind_tls, make_certificate


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


def test_the_redis_that_is_given_outranks_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://elsewhere:1/0")
    monkeypatch.setenv("CELERY_RESULT_BACKEND", "redis://elsewhere:1/0")
    url = f"redis://127.0.0.1:{free_port()}/0"
    app = Celery(set_as_current=False)
    app.conf.update(broker_url="redis://elsewhere:2/0")
    use_redis(app, url)
    for check in (check_broker, check_backend):
        with pytest.raises(RedisUnavailable, match=url):
            check(app)


def test_an_app_without_a_result_backend_is_one_error() -> None:
    with pytest.raises(SettingsError, match="has no result backend"):
        check_backend(Celery("silent", set_as_current=False))


@pytest.mark.parametrize("url", ["reddis://h", "no.such://h", "redis://h:99999", "redis://[::1"])
def test_a_url_that_celery_cannot_use_is_one_error(url: str) -> None:
    app = Celery(broker=url, backend=url, set_as_current=False)
    for check, setting in ((check_broker, "broker_url"), (check_backend, "result_backend")):
        with pytest.raises(SettingsError, match=f"^{setting} cannot be used: "):
            check(app)


def test_other_brokers_and_backends_are_left_to_celery() -> None:
    app = Celery(broker="memory://", backend="cache+memory://", set_as_current=False)
    check_broker(app)
    check_backend(app)


def test_a_redis_behind_tls_is_asked_as_celery_asks_it(
    tmp_path: Path, every_redis: OwnRedis
) -> None:
    certificate = make_certificate(tmp_path)
    authority = str(certificate.authority)
    with behind_tls(every_redis.port, certificate) as url:
        bare = url.partition("?")[0]
        spelled = f"{bare}?ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={authority}"
        apps = [Celery(broker=each, backend=each, set_as_current=False) for each in (url, spelled)]
        valkey = Celery(set_as_current=False)
        install(valkey)
        valkey_url = spelled.replace("rediss", "valkeys")
        valkey.conf.update(broker_url=valkey_url, result_backend=valkey_url)
        apps.append(valkey)
        for each in (bare, bare.replace("rediss", "redis")):
            apps.append(Celery(broker=each, backend=each, set_as_current=False))
            options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": authority}
            apps[-1].conf.update(broker_use_ssl=options, redis_backend_use_ssl=options)
        for app in apps:
            check_broker(app)
            check_backend(app)
        (tmp_path / "other").mkdir()
        other = make_certificate(tmp_path / "other").authority
        wrong = f"{bare}?ssl_cert_reqs=required&ssl_ca_certs={other}"
        stranger = Celery(broker=wrong, backend=wrong, set_as_current=False)
        for check in (check_broker, check_backend):
            with pytest.raises(RedisUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                check(stranger)
