"""An upgrade to another layout of Redis: not side by side, and no job is lost."""

from batchery.transport.redis_schema import Keys
from conftest import StartWorker
from support.harness import open_redis


def test_a_worker_does_not_touch_what_a_newer_version_has_written(
    redis_url: str, start_worker: StartWorker
) -> None:
    with open_redis(redis_url) as store:
        store.set(Keys().schema, 99)
        store.lpush("apps.shop.shout", "of the future")
        worker = start_worker("apps.shop", ready=False)
        assert worker.wait_exit() != 0
        assert "their layout is 99, and this worker knows 2; update the worker" in worker.log
        assert store.lrange("apps.shop.shout", 0, -1) == [b"of the future"]
        assert not store.exists(Keys().workers)
