"""A Redis Cluster whose nodes are killed and whose slots move, and a RabbitMQ that is killed.

The harness is that of `test_chaos.py`; these are its short runs. `python -m benchmarks.chaos` has
the long ones: `--cluster`, `--rabbitmq`.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from threading import Event

import pytest
from celery import Celery
from redis.crc import key_slot

from batchery import Client, install
from batchery.transport.cluster import find_shard, list_tags
from benchmarks.chaos.chaos import run
from benchmarks.chaos.plan import Plan
from benchmarks.chaos.verdict import Verdict
from benchmarks.rabbitmq import find_rabbitmq
from benchmarks.redis_cluster import find_cluster_server
from support.harness import Worker, open_redis, wait_for
from support.own_cluster import OwnCluster
from support.patience import TIMEOUT_S

#: A worker and a device die. Ordinary tasks are Celery's own, which loses some.
DEATHS = Plan(
    ordinary=0,
    jobs=300,
    kills=1,
    device_kills=1,
    child_kills=0,
    stops=0,
    redis_restarts=0,
    cuts=0,
    fills=0,
    failovers=0,
    malformed=2,
    gap_s=3,
)

ON_A_CLUSTER = replace(DEATHS, cluster=True, failovers=1, redis_restarts=1, moves=2)

BY_RABBITMQ = replace(DEATHS, rabbitmq=True, broker_restarts=2)


SERVER = find_cluster_server()

QUEUE = "apps.shop.shout"


def is_kept(verdict: Verdict, plan: Plan) -> bool:
    """Whether each job of a plan was answered, once and rightly."""
    found = (verdict.lost, verdict.stuck, verdict.wrong, verdict.doubled)
    return verdict.submitted == plan.jobs and not any(found) and not verdict.unknown_keys


@pytest.mark.timeout(300)
@pytest.mark.skipif(SERVER is None, reason="no Redis 7 or newer is installed here")
def test_nothing_is_lost_while_primaries_are_killed_and_slots_move(tmp_path: Path) -> None:
    verdict = run(ON_A_CLUSTER, tmp_path, print)
    assert {"fail over", "kill redis", "move slot", "kill worker"} <= set(verdict.faults)
    assert is_kept(verdict, ON_A_CLUSTER), verdict.text
    # Whoever runs and whoever starts outlives the moments without a node.
    assert verdict.ended == 0, verdict.text


@pytest.mark.skipif(SERVER is None, reason="no Redis 7 or newer is installed here")
def test_jobs_go_on_while_the_cluster_grows(tmp_path: Path, redis_url: str) -> None:
    with OwnCluster(tmp_path / "nodes", replicas=0, binary=SERVER) as cluster:
        env = {"CELERY_RESULT_BACKEND": cluster.url, "BATCHERY_REDIS_URL": cluster.url}
        worker = Worker(tmp_path, redis_url, "apps.shop", "-Q", QUEUE, env=env)
        try:
            app = Celery("client", broker=redis_url, backend=cluster.url, set_as_current=False)
            install(app, redis_url=cluster.url)
            with Client(app) as client, ThreadPoolExecutor(1) as pool:
                shout = client.task(QUEUE)
                assert list(shout.map(["ready"], timeout_s=TIMEOUT_S)) == ["READY"]
                stop = Event()
                texts = (
                    f"text {number}" for number in takewhile(lambda _: not stop.is_set(), count())
                )
                answers = pool.submit(list, shout.map(texts, window=50, timeout_s=TIMEOUT_S))
                new = cluster.grow()
                # The queue's first, then those of some results.
                for shard in (find_shard(QUEUE), 3, 9, 15):
                    cluster.move(key_slot(list_tags()[shard].encode()), new)
                with open_redis(new.url) as redis:
                    wait_for(lambda: any(redis.scan_iter("*celery-task-meta-*")), "it is used")
                stop.set()
                found = answers.result(TIMEOUT_S)
            assert found == [f"TEXT {number}" for number in range(len(found))]
            assert worker.stop() == 0
        finally:
            worker.kill()


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_rabbitmq() is None, reason="no RabbitMQ is installed here")
def test_nothing_is_lost_while_the_broker_a_worker_and_a_device_are_killed(tmp_path: Path) -> None:
    verdict = run(BY_RABBITMQ, tmp_path, print)
    assert {"kill broker", "kill worker", "kill device"} <= set(verdict.faults)
    assert is_kept(verdict, BY_RABBITMQ), verdict.text
