import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.collect import LONGEST_PAUSE_S, SHORTEST_PAUSE_S, Pace
from batchery_producer.rate import Rate
from batchery_producer.window import Place, Window


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


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 5000), st.floats(0, 10), st.floats(0, 5))
    )
)
def test_pauses_stay_between_their_limits_whatever_happens(
    sweeps: list[tuple[int, int, float, float]],
) -> None:
    pace = Pace()
    for in_flight, arrived, since_s, sweep_s in sweeps:
        pause_s = pace.pause_s(
            in_flight=in_flight, arrived=arrived, since_s=since_s, sweep_s=sweep_s
        )
        assert SHORTEST_PAUSE_S <= pause_s <= max(LONGEST_PAUSE_S, sweep_s)


def test_a_fast_queue_is_asked_often_enough_to_stay_full() -> None:
    pace = Pace()
    for _ in range(20):  # 10,000 results per second, 1,000 jobs in flight.
        pause_s = pace.pause_s(in_flight=1000, arrived=100, since_s=0.01, sweep_s=0.001)
    assert pause_s == pytest.approx(1000 / 8 / 10_000)


def test_pauses_grow_while_nothing_comes_and_shrink_when_something_does() -> None:
    pace = Pace()
    pauses = [pace.pause_s(in_flight=10, arrived=0, since_s=1, sweep_s=0) for _ in range(30)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pace.pause_s(in_flight=8, arrived=100, since_s=0.1, sweep_s=0) == SHORTEST_PAUSE_S


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(0.0)
    assert rate.per_second(0.0, 0) == 0
    for second in range(1, 61):
        slow = rate.per_second(float(second), second * 10)
    assert slow == pytest.approx(10)
    for second in range(1, 21):
        fast = rate.per_second(60.0 + second, 600 + second * 100)
    assert fast == pytest.approx(100)
