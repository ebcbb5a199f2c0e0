"""A device that leases from several shards of a cluster, without the device."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from batchery import BatchTask, install
from batchery_worker.device.redis_source import RedisSource
from batchery_worker.device.sharded_source import ShardedSource
from support.harness import wait_for
from support.own_cluster import OwnCluster

#: Queues in different shards.
QUEUES = ("apps.shop.shout", "apps.shop.bound")


class Room:
    """Lets any number of messages be leased; the device is not entered as waiting."""

    def count_free(self) -> int:
        return 0

    def limit_for(self, queue: str, level: int) -> int:
        return 1000

    def find_jobs(self, queue: str) -> Any:
        return queue


class Lessee:
    """Notes of each message with which leases it was handed over."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.delivered: list[tuple[str, Any]] = []
        self.source = ShardedSource(app, self._make, QUEUES)
        self.source.workload = Room()

    def _make(self, names: Any, *options: Any) -> RedisSource:
        return RedisSource(self._app, names, (), "lessee", self._deliver, lambda _: (), *options)

    def _deliver(self, payload: Any) -> None:
        store = self.source.open_channel(None).lease_store
        self.delivered.append((payload["properties"]["delivery_tag"], store))

    def take(self, count: int) -> list[tuple[str, Any]]:
        """What is handed over from now on, until so many messages were."""
        self.delivered.clear()

        def is_done() -> bool:
            assert self.source.connect()
            if self.source.ask() and (answer := self.source.read()):
                self.source.take_in(answer)
            return len(self.delivered) >= count

        wait_for(is_done, "all are handed over")
        return [*self.delivered]


def unused(items: list[Any]) -> list[Any]:
    """Stands for a function that workers have."""
    return items


@pytest.fixture
def app(cluster: OwnCluster, redis_url: str) -> Iterator[Celery]:
    with Celery("sharded", broker=redis_url, backend=redis_url, set_as_current=False) as made:
        install(made, redis_url=cluster.url)
        for name in QUEUES:
            made.task(shared=False, base=BatchTask, name=name)(unused)
        yield made


def test_what_comes_again_has_the_lease_of_its_own_shard(app: Celery) -> None:
    lessee = Lessee(app)
    try:
        for name in QUEUES:
            app.tasks[name].delay("text")
        first = lessee.take(2)
        assert all(store.holds(token) for token, store in first)
        for token, store in first:
            # As if the connection had broken before they were handed over.
            store.leases.leave([token])
        lessee.source.prepare_anew()
        assert sorted(lessee.take(2), key=str) == sorted(first, key=str)
    finally:
        for token, store in lessee.delivered:
            store.ack(token)
        lessee.source.close()
