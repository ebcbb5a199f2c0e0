"""`batchery exporter`: queues from Redis alone, and a lost Redis."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from apps import shop
from batchery import BatchTask, install
from support.harness import wait_for
from support.metrics_port import Exporter
from support.own_redis import OwnRedis
from support.patience import patient

StartExporter = Callable[..., Exporter]


@pytest.fixture
def start_exporter(own_redis: OwnRedis) -> Iterator[StartExporter]:
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str) -> Exporter:
            made = Exporter(own_redis.url, *arguments)
            stack.callback(made.close)
            return made

        yield begin


@pytest.fixture
def sender(own_redis: OwnRedis) -> Iterator[Celery]:
    """A client on that Redis."""
    with Celery(broker=own_redis.url, backend=own_redis.url, set_as_current=False) as made:
        install(made)
        yield made
        backend: Any = made.backend
        backend.result_consumer.stop()


def wait_says(exporter: Exporter, path: str, status: int) -> None:
    """Waits for an answer: who asks, and the exporter, give up after some seconds."""

    def is_said() -> bool:
        said, text = exporter.says(path)
        return said == status and (text == "ok") == (status == 200)

    wait_for(is_said, f"{path} says {status}")


def test_queues_are_counted_where_no_worker_is(
    start_exporter: StartExporter, sender: Celery
) -> None:
    exporter = start_exporter("--queues", "other")
    empty = exporter.known()
    assert empty["batchery_queue_waiting_jobs", "celery"] == 0
    assert empty["batchery_queue_oldest_job_seconds", "celery"] == 0
    # Over all lists of a queue, one of each priority.
    for priority in (0, 3, 9):
        sender.send_task("shout", ["a"], priority=priority)
    # It says when it was sent; those of plain clients do not.
    copied = sender.task(name=shop.shout.name, base=BatchTask, shared=False)
    shout: BatchTask = copied(shop.shout.run)
    shout.apply_async(("a",), queue="other", tenant="acme")

    def counted() -> Any:
        """A survey of all of them: one may have begun before the last was sent."""
        found = exporter.known()
        waiting = [found["batchery_queue_waiting_jobs", queue] for queue in ("celery", "other")]
        return found if waiting == [3, 1] else None

    samples = wait_for(counted, "they are counted")
    assert samples["batchery_queue_leased_jobs", "celery"] == 0
    assert 0 < samples["batchery_queue_oldest_job_seconds", "other"] < patient(60)
    assert ("batchery_queue_oldest_job_seconds", "celery") not in samples
    assert (samples["batchery_scheduled_jobs",], samples["batchery_dead_letters",]) == (0, 0)
    wait_says(exporter, "/livez", 200)
    wait_says(exporter, "/readyz", 200)


def test_redis_says_how_full_it_is_and_what_it_has_thrown_away(
    start_exporter: StartExporter, own_redis: OwnRedis
) -> None:
    with Redis.from_url(own_redis.url) as client:
        limit = client.info("memory")["used_memory"] + (4 << 20)
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", limit)
        for number in range(100):
            client.set(f"key-{number}", "x" * (1 << 16))
    samples = start_exporter().known()
    assert samples["batchery_redis_memory_used_bytes",] > 0
    assert samples["batchery_redis_memory_max_bytes",] == limit
    assert samples["batchery_redis_evicted_keys_total",] > 0


def test_lost_redis_is_no_empty_queue_and_holds_no_scrape_up(
    start_exporter: StartExporter, own_redis: OwnRedis
) -> None:
    exporter = start_exporter()
    assert exporter.known()
    with own_redis.hanging():
        # It may be the survey of a moment ago.
        wait_for(lambda: exporter.samples()["batchery_broker_up",] == 0, "it is missed")
        text = exporter.scrape()
        assert "batchery_queue_waiting_jobs" not in text
        wait_says(exporter, "/livez", 200)
        wait_says(exporter, "/readyz", 503)
    wait_for(lambda: exporter.samples()["batchery_broker_up",] == 1, "it answers again")
    own_redis.kill()
    wait_for(lambda: exporter.samples()["batchery_broker_up",] == 0, "it has gone")
    wait_says(exporter, "/readyz", 503)
    own_redis.start()
    wait_for(lambda: exporter.samples()["batchery_broker_up",] == 1, "it is there again")
    wait_says(exporter, "/readyz", 200)


def test_exporter_ends_with_a_signal(start_exporter: StartExporter) -> None:
    exporter = start_exporter()
    exporter.process.terminate()
    assert exporter.process.wait(patient(60)) == 0
