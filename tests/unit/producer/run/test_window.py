import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.run.loop import Rate
from batchery_producer.run.window import Place, Window


@given(size=st.integers(1, 50), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_no_more_jobs_are_in_flight_than_the_window_allows(
    size: int, steps: list[tuple[bool, int]]
) -> None:
    window = Window(size)
    expected: dict[str, Place] = {}
    serial = 0
    for sends, count in steps:
        if sends:
            jobs = {f"job-{serial + n}": Place(serial + n, None) for n in range(count)}
            serial += count
            if count > window.room:
                with pytest.raises(ValueError, match="room"):
                    window.add(jobs)
            else:
                window.add(jobs)
                expected |= jobs
        else:
            for task_id in list(window)[:count]:
                assert window.settle(task_id) == expected.pop(task_id)
        assert list(window) == list(expected)
        assert len(window) + window.room == size
        assert 0 <= len(window) <= size


def test_a_window_holds_at_least_one_job() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Window(0)


def test_a_job_is_settled_once() -> None:
    window = Window(1)
    window.add({"a": Place(1, "x")})
    window.settle("a")
    with pytest.raises(KeyError):
        window.settle("a")


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(0.0)
    assert rate.per_second(0.0, 0) == 0
    for second in range(1, 61):
        slow = rate.per_second(float(second), second * 10)
    assert slow == pytest.approx(10)
    for second in range(1, 21):
        fast = rate.per_second(60.0 + second, 600 + second * 100)
    assert fast == pytest.approx(100)
