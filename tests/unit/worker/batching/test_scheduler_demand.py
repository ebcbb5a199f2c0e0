"""What a scheduler says of its waiting jobs to who decides how many more to take."""

from batchery_worker.batching.scheduler import Scheduler
from batchery_worker.job import Batch, BatchKey, Job, Lane, Limits

KEYS = [BatchKey("shout"), BatchKey("shout", '{"tag":"x"}'), BatchKey("embed", "", (1.0, None))]

LANES = [Lane("high"), Lane("low", "a"), Lane("low", "b")]

SHARES = {"high": 3.0, "low": 1.0}


def job(number: int, key: BatchKey, lane: Lane) -> Job[None]:
    return Job(str(number), key, Limits(4), 1, 0.0, None, lane)


def test_jobs_that_could_share_a_batch_are_counted_by_class() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    for number, (key, lane) in enumerate(
        [(0, 0), (0, 1), (0, 2), (1, 1), (1, 1), (1, 1), (2, 1), (2, 1), (2, 1), (2, 1)]
    ):
        scheduler.admit(job(number, KEYS[key], LANES[lane]))
    assert scheduler.count("shout", "low") == 3
    assert scheduler.count("shout", "high") == 1
    assert scheduler.count("embed", "low") == 4
    assert scheduler.count("embed", "high") == scheduler.count("unknown", "low") == 0


def test_a_higher_class_may_go_before_batches_that_no_suspect_is_in() -> None:
    scheduler: Scheduler[None] = Scheduler(SHARES)
    scheduler.admit(job(1, KEYS[0], LANES[1]))
    batch = scheduler.next_batch(0, alone=False, now_s=0.0)
    assert batch is not None
    assert scheduler.goes_before("high", [batch])
    assert not scheduler.goes_before("low", [batch])
    assert not scheduler.goes_before("high", [])
    assert not scheduler.goes_before(
        "high", [batch, Batch((job(2, KEYS[0], LANES[1]),), alone=True)]
    )
