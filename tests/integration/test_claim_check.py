"""`put_media`: bytes by reference, in Redis or in a store."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from celery import Celery

from batchery import (
    BrokerRefused,
    DatasetError,
    GaveUp,
    InvalidItem,
    SettingsError,
    install,
    put_media,
)
from batchery_producer.media import remove_media
from conftest import StartWorker
from support import object_store
from support.harness import Worker, open_redis
from support.object_store import PartsFileSystem
from support.own_redis import OwnRedis
from support.patience import patient
from support.served_pictures import PICTURE, make_folder, make_variables

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = make_folder(tmp_path_factory.mktemp("pictures"))
    return start_module_worker("batchery.app", env=make_variables(folder, timeout_s=patient(60)))


@pytest.fixture(autouse=True)
def stores() -> Iterator[None]:
    object_store.register()
    yield
    PartsFileSystem.contents.clear()
    PartsFileSystem.is_away = False


def see(client: Celery, item: Any) -> Any:
    return client.send_task("see", [item], queue="see").get(timeout=TIMEOUT_S)["vector"]


def test_a_worker_reads_what_a_client_has_put_there(
    worker: Worker, client: Celery, store: Any
) -> None:
    reference = put_media(client, PICTURE)
    assert reference.startswith("batchery:")
    (key,) = store.scan_iter("batchery:media:*")
    assert 86_000 < store.ttl(key) <= 86_400
    assert see(client, reference) == see(client, PICTURE)
    # It may serve several jobs, so a result does not end it.
    assert see(client, {"image": reference}) == see(client, PICTURE)
    remove_media(client, reference)
    with pytest.raises(InvalidItem, match="image: "):
        see(client, reference)


def test_references_are_not_guessed_and_expire(client: Celery, store: Any) -> None:
    references = {put_media(client, bytearray(PICTURE), expires_s=0.05) for _ in range(20)}
    assert len(references) == 20
    assert all(len(each) > len("batchery:") + 20 for each in references)
    one = put_media(client, memoryview(PICTURE), expires_s=1)
    assert 0 < store.pttl(f"batchery:media:{one.removeprefix('batchery:')}") <= 1000
    remove_media(client, one)


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        (b"", {}, "data is 0 bytes; expected 1 to media.max_bytes = 10 bytes"),
        ("text", {}, "data is 'text'; expected 1 to"),
        (b"x" * 11, {}, "data is 11 bytes; expected 1 to media.max_bytes = 10 bytes"),
        (b"x", {"expires_s": 0}, "expires_s = 0: expected 0.001 to"),
        (b"x", {"expires_s": float("nan")}, "expires_s = nan: expected"),
    ],
)
def test_what_cannot_be_put_says_why(
    redis_url: str, data: Any, options: dict[str, Any], why: str
) -> None:
    app = install(Celery("a", broker=redis_url, backend=redis_url), media={"max_bytes": 10})
    with pytest.raises(InvalidItem, match=why):
        put_media(app, data, **options)


@pytest.mark.parametrize("prefix", ["", "shop:"])
def test_keys_have_the_prefix_of_the_app(redis_url: str, store: Any, prefix: str) -> None:
    app = Celery("a", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.result_backend_transport_options = {"global_keyprefix": prefix}
    reference = put_media(app, b"data")
    key = f"{prefix}batchery:media:{reference.removeprefix('batchery:')}"
    assert store.get(key) == b"data"
    remove_media(app, reference)
    assert not store.exists(key)


#: In a process of its own: once `install` is called, all of kombu's Redis channels are ours.
PLAIN = """
import sys, celery
from batchery import put_media
app = celery.Celery("a", broker=sys.argv[1])
app.conf.broker_transport_options = {"global_keyprefix": "shop:"}
print(put_media(app, b"data"))
"""


def test_without_a_redis_of_results_it_is_that_of_the_broker(redis_url: str, store: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, redis_url], check=True, capture_output=True, text=True
    )
    reference = done.stdout.strip()
    installed = install(Celery("b", broker=redis_url))
    installed.conf.broker_transport_options = {"global_keyprefix": "shop:"}
    for each in (reference, put_media(installed, b"data")):
        key = f"shop:batchery:media:{each.removeprefix('batchery:')}"
        assert store.get(key) == b"data"
        remove_media(installed, each)
    with pytest.raises(SettingsError, match="name a store"):
        put_media(Celery("c", broker="memory://"), b"data")


def test_a_store_gets_a_file_whose_url_is_the_item(client: Celery) -> None:
    urls = [put_media(client, b"data", store=each) for each in ("parts://b/calls", "parts://b/")]
    assert [url.rpartition("/")[0] for url in urls] == ["parts://b/calls", "parts://b"]
    for url in urls:
        with fsspec.open(url) as file:
            assert file.read() == b"data"
    with pytest.raises(DatasetError, match=r"nowhere://b/.*Protocol not known"):
        put_media(client, b"data", store="nowhere://b")
    PartsFileSystem.is_away = True
    with pytest.raises(DatasetError, match=r"parts://b/.*could not connect"):
        put_media(client, b"data", store="parts://b")


def test_a_redis_that_is_full_or_away_says_so(own_redis: OwnRedis) -> None:
    app = Celery("a", broker=own_redis.url, backend=own_redis.url, set_as_current=False)
    with open_redis(own_redis.url) as redis:
        redis.config_set("maxmemory", "1")
    with pytest.raises(BrokerRefused, match="Redis has no memory left"):
        put_media(app, PICTURE)
    own_redis.kill()
    with pytest.raises(GaveUp, match="Redis does not answer"):
        put_media(app, PICTURE)
