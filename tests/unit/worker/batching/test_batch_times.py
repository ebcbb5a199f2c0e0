"""When the batch behind a batch is sent, and when nobody knows any more how long a batch takes."""

from math import inf

import pytest

from batchery_worker.batching.batch_times import LONG_BATCH_S, BatchTimes

TASK = "embed"


def times(*run_s: float, prepare_s: float = 0.01, items: int = 32) -> BatchTimes:
    """What was learned from batches that took so long."""
    learned = BatchTimes()
    for each in run_s:
        learned.ran(TASK, items, each, prepare_s)
    return learned


def test_the_next_batch_waits_for_the_end_of_one_of_which_nothing_is_known() -> None:
    assert times().next_s(TASK, 32, began_s=5.0) == inf
    known = times(0.005)
    assert known.next_s("classify", 32, began_s=5.0) == inf
    assert known.next_s(TASK, 1, began_s=5.0) == inf


def test_the_next_batch_is_sent_at_once_where_batches_are_short() -> None:
    assert times(0.005).next_s(TASK, 32, began_s=5.0) == 5.0
    # The shortest one counts: a device must not wait for its next batch.
    assert times(2.0, 0.005).next_s(TASK, 32, began_s=5.0) == 5.0


def test_the_next_batch_of_a_long_one_is_sent_when_a_quarter_is_left() -> None:
    assert times(2.0, 3.0).next_s(TASK, 32, began_s=5.0) == 6.5
    # Batches of about the same size take about as long.
    assert times(2.0).next_s(TASK, 17, began_s=5.0) == 6.5


def test_the_next_batch_is_sent_in_time_for_its_preparation() -> None:
    assert times(2.0, prepare_s=0.75).next_s(TASK, 32, began_s=5.0) == 5.5
    assert times(2.0, prepare_s=9.0).next_s(TASK, 32, began_s=5.0) == 5.0


def test_only_recent_batches_count() -> None:
    assert times(0.005, *[2.0] * 8).next_s(TASK, 32, began_s=0.0) == 1.5


@pytest.mark.parametrize(
    ("run_s", "now_s", "soon"),
    [
        # Nobody knows.
        ((), 0.0, False),
        ((), 2.0, False),
        ((0.9 * LONG_BATCH_S,), 0.0, True),
        ((0.9 * LONG_BATCH_S,), 1.5 * LONG_BATCH_S, True),
        ((LONG_BATCH_S,), 0.0, False),
        ((2.0,), 1.0, False),
        ((2.0,), 1.5, True),
        ((2.0,), 3.0, True),
        # It takes longer than any of late: it may as well take an hour.
        ((2.0,), 3.1, False),
        ((0.005,), 0.1, True),
        ((0.005,), 1.0, False),
    ],
)
def test_a_batch_ends_soon_near_the_time_that_others_took(
    run_s: tuple[float, ...], now_s: float, soon: bool
) -> None:
    assert times(*run_s).ends_soon(TASK, 32, began_s=0.0, now_s=now_s) is soon


def test_batches_are_long_until_those_of_late_are_short() -> None:
    assert not times().are_short([TASK])
    assert not times(0.5).are_short([TASK])
    assert times(0.005).are_short([TASK])
    # A device that is held up once has no long batches.
    assert times(0.5, 0.005, 0.005).are_short([TASK])
    assert times(*[0.5] * 8, *[0.005] * 5).are_short([TASK])


def test_batches_of_tasks_are_short_if_those_of_each_are() -> None:
    both = times(0.005)
    assert not both.are_short([TASK, "other"])
    both.ran("other", 1, 0.005, 0.0)
    assert both.are_short([TASK, "other"])
    assert both.are_short(["other"])
