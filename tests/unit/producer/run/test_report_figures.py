import random
from itertools import pairwise

import pytest

from batchery_producer.run.report import (
    MAX_BUCKETS,
    MAX_CHARACTERS,
    MAX_KINDS,
    OTHER_KINDS,
    Figures,
    Histogram,
    Timeline,
)


def histogram(values: list[float]) -> Histogram:
    made = Histogram()
    for value in values:
        made.add(value)
    return made


def test_percentiles_are_exact_to_a_tenth() -> None:
    values = sorted(random.Random(1).lognormvariate(0, 2) for _ in range(5000))
    made = histogram(values)
    for percent in (1, 10, 50, 90, 99):
        exact = values[int(len(values) * percent / 100) - 1]
        assert made.percentile(percent) == pytest.approx(exact, rel=0.1)
    assert (made.minimum, made.maximum, made.count) == (values[0], values[-1], 5000)
    assert made.mean == pytest.approx(sum(values) / 5000)


@pytest.mark.parametrize(
    ("values", "half"), [([], 0), ([0, 0, 0], 0), ([64] * 3, 64), ([0, 0, 0, 7], 0)], ids=str
)
def test_percentiles_of_few_values(values: list[float], half: float) -> None:
    assert histogram(values).percentile(50) == half


def test_bars_hold_all_positive_values_within_their_maximum() -> None:
    values = [0.0] + [random.Random(2).uniform(0, 1) ** 9 for _ in range(1000)]
    bars = list(histogram(values).bars(20))
    assert len(bars) <= 20
    assert sum(count for _, _, count in bars) == sum(value > 0 for value in values)
    assert all(left < right for left, right, _ in bars)
    assert all(one[1] <= next_[0] for one, next_ in pairwise(bars))


def test_timeline_gets_coarser_and_keeps_all_counts() -> None:
    timeline = Timeline()
    for second in range(10_000):
        timeline.add(second)
    assert len(timeline.counts) <= MAX_BUCKETS
    assert sum(timeline.counts) == 10_000
    assert set(timeline.counts[:-1]) == {int(timeline.width_s)}


def test_timeline_with_a_pause_of_a_day_stays_small() -> None:
    timeline = Timeline()
    timeline.add(0)
    timeline.add(86_400)
    assert len(timeline.counts) <= MAX_BUCKETS
    assert (timeline.counts[0], timeline.counts[-1], sum(timeline.counts)) == (1, 1, 2)


def test_job_of_an_earlier_run_has_no_latency() -> None:
    figures = Figures()
    figures.sent(1.0, ["a", "b"])
    figures.ended(1.5, "a", 4)
    figures.ended(2.0, "of an earlier run", 0)
    assert (figures.latency.count, figures.latency.maximum) == (1, 0.5)
    assert (figures.batch_sizes.count, figures.batch_sizes.maximum) == (1, 4)


def test_lengths_count_only_texts() -> None:
    figures = Figures()
    figures.read(["four", {"text": "none"}, 5, "äö"])
    assert (figures.lengths.count, figures.lengths.minimum, figures.lengths.maximum) == (2, 2, 4)


def test_kinds_of_failures_have_a_maximum_and_keep_their_first_message() -> None:
    figures = Figures()
    for number in range(MAX_KINDS * 3):
        figures.failed(number, f"line {number}", f"Kind{number % (MAX_KINDS * 2)}", "x" * 10_000)
    kinds = {kind.name: kind for kind in figures.kinds}
    assert len(kinds) == MAX_KINDS + 1
    assert figures.kinds[0] is kinds[OTHER_KINDS]
    assert kinds[OTHER_KINDS].count == MAX_KINDS
    assert (kinds["Kind3"].count, kinds["Kind3"].line_name) == (2, "line 3")
    assert len(kinds["Kind3"].message) == MAX_CHARACTERS
    assert sum(figures.done.counts) == MAX_KINDS * 3
