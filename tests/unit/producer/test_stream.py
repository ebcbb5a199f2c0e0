"""Which jobs are sent, and in which order their answers go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.answers import Answer
from batchery_producer.stream import Window

Numbers = Window[int]
ENDED = Answer()


@given(size=st.integers(1, 50), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_window_never_holds_more_jobs_than_its_size(
    size: int, steps: list[tuple[bool, int]]
) -> None:
    window = Numbers(size)
    expected: dict[str, int] = {}
    serial = 0
    for sends, count in steps:
        if sends:
            jobs = {f"job-{serial + n}": serial + n for n in range(count)}
            serial += count
            if count > window.free:
                with pytest.raises(ValueError, match="free"):
                    window.add(jobs)
            else:
                window.add(jobs)
                expected |= jobs
        else:
            for task_id in window.in_flight[:count]:
                assert list(window.end(task_id, ENDED)) == [(task_id, expected.pop(task_id), ENDED)]
        assert window.in_flight == list(expected)
        assert len(window) + window.free == size
        assert 0 <= len(window) <= size


def test_window_of_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Numbers(0)


@given(order=st.permutations(range(9)))
def test_ordered_window_hands_jobs_on_in_the_order_of_sending(order: list[int]) -> None:
    window = Numbers(9, ordered=True)
    window.add({str(number): number for number in range(9)})
    handed_on: list[int] = []
    for count, number in enumerate(order, 1):
        handed_on += [ref for _, ref, _ in window.end(str(number), ENDED)]
        assert handed_on == list(range(len(handed_on)))
        assert len(window) == 9 - len(handed_on)  # What waits for older jobs still counts.
        assert len(window.in_flight) == 9 - count
    assert handed_on == list(range(9))
