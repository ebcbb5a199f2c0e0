"""The fault harness finds what the stock transport loses, and nothing where nothing is lost.

`CHAOS_FACTOR=20 make test TESTS=tests/faults/test_chaos.py` makes the long run so much longer;
`python -m benchmarks.chaos` has all its options.
"""

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.chaos import run
from benchmarks.chaos.plan import Plan

#: How much longer than usual the long run is.
FACTOR = int(os.environ.get("CHAOS_FACTOR", "1"))

QUIET = Plan(
    kills=0,
    device_kills=0,
    child_kills=0,
    stops=0,
    redis_restarts=0,
    cuts=0,
    fills=0,
    failovers=0,
    malformed=0,
    patience_s=60,
)

#: Of what must cost nothing a little. Not the moments in which Redis is full or gone: a chain's
#: next step cannot be published then, which fails its job, as Celery does. And one device dies: by
#: chance two deaths could hit one suspect, which is then taken for the culprit.
TORMENT = Plan(
    transport="batchery",
    # Ordinary ones are Celery's own, which loses some.
    ordinary=0,
    jobs=400 * FACTOR,
    seed=FACTOR,
    kills=2 * FACTOR,
    device_kills=1,
    stops=FACTOR,
    redis_restarts=0,
    cuts=2 * FACTOR,
    fills=0,
    failovers=0,
    malformed=12,
    elders=1,
    sample_s=1.0,
)

#: A Redis without room, and one that takes no writes: nobody ends, and all goes on afterwards.
REFUSED = replace(QUIET, ordinary=0, jobs=200, seed=2, kills=1, fills=1, failovers=1, gap_s=4)


def test_the_harness_finds_the_jobs_that_stock_leaves_behind_a_killed_worker(
    tmp_path: Path,
) -> None:
    # Ordinary jobs come back after the visibility timeout, an hour: long after the run. They are
    # so many that the worker has some whenever it is killed.
    plan = replace(
        QUIET, jobs=150, ordinary=30, transport="stock", kills=1, workers=1, patience_s=2
    )
    verdict = run(plan, tmp_path)
    assert verdict.faults == {"kill worker": 1, "scale": 1}
    assert verdict.submitted == 150
    assert verdict.stuck > 0
    assert verdict.answered + verdict.stuck + verdict.lost == 150
    assert not verdict.is_good
    assert "NOT GOOD" in verdict.text
    assert any(example.startswith("stuck: ") for example in verdict.examples)


@pytest.mark.skipif(
    importlib.util.find_spec("batchery.transport") is None, reason="batchery.transport is not there"
)
@pytest.mark.timeout(300 * FACTOR)
def test_nothing_is_lost_doubled_wrong_or_stuck_whatever_is_killed(tmp_path: Path) -> None:
    verdict = run(TORMENT, tmp_path, print)
    assert verdict.submitted == TORMENT.jobs
    # A chain's next step is sent before its message is settled: where a worker is killed in
    # between, the next one sends it again.
    found = (verdict.lost, verdict.stuck, verdict.wrong, verdict.doubled)
    assert found == (0, 0, 0, 0), verdict.text
    # It has followed the jobs of those that were killed or stopped.
    assert verdict.recoveries
    # Docs have a bound for each family of keys.
    assert verdict.unknown_keys == []
    seen = {name.partition(":")[0] for each in verdict.samples for name in each.figures}
    assert {"elder main process", "main process", "device process", "exporter", "redis"} <= seen
    assert any("celery-task-meta-* keys" in each.figures for each in verdict.samples)
    assert verdict.failed_scrapes < len(verdict.samples)


@pytest.mark.timeout(300)
def test_workers_outlive_a_full_redis_and_a_failover_and_lose_nothing(tmp_path: Path) -> None:
    verdict = run(REFUSED, tmp_path, print)
    assert {"fill redis", "free redis", "fail over", "follow", "kill worker"} <= set(verdict.faults)
    assert verdict.submitted == REFUSED.jobs
    assert verdict.unknown_keys == []
    # Neither a worker that runs nor one that starts ends because it is refused.
    assert verdict.ended == 0, verdict.text
    found = (verdict.lost, verdict.stuck, verdict.doubled)
    assert found == (0, 0, 0), verdict.text
