"""A Redis Cluster whose nodes are killed and whose slots move, and a RabbitMQ that is killed.

The harness is that of `test_chaos.py`; these are its short runs. `python -m benchmarks.chaos` has
the long ones: `--cluster`, `--rabbitmq`.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.chaos import run
from benchmarks.chaos.plan import Plan
from benchmarks.chaos.verdict import Verdict
from benchmarks.rabbitmq import find_rabbitmq
from benchmarks.redis_cluster import find_cluster_server

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


def is_kept(verdict: Verdict, plan: Plan) -> bool:
    """Whether each job of a plan was answered, once and rightly."""
    found = (verdict.lost, verdict.stuck, verdict.wrong, verdict.doubled)
    return verdict.submitted == plan.jobs and not any(found) and not verdict.unknown_keys


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_cluster_server() is None, reason="no Redis 7 or newer is installed here")
def test_nothing_is_lost_while_primaries_are_killed_and_slots_move(tmp_path: Path) -> None:
    verdict = run(ON_A_CLUSTER, tmp_path, print)
    assert {"fail over", "kill redis", "move slot", "kill worker"} <= set(verdict.faults)
    assert is_kept(verdict, ON_A_CLUSTER), verdict.text
    # Whoever runs and whoever starts outlives the moments without a node.
    assert verdict.ended == 0, verdict.text


@pytest.mark.timeout(300)
@pytest.mark.skipif(find_rabbitmq() is None, reason="no RabbitMQ is installed here")
def test_nothing_is_lost_while_the_broker_a_worker_and_a_device_are_killed(tmp_path: Path) -> None:
    verdict = run(BY_RABBITMQ, tmp_path, print)
    assert {"kill broker", "kill worker", "kill device"} <= set(verdict.faults)
    assert is_kept(verdict, BY_RABBITMQ), verdict.text
