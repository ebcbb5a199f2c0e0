import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.results.polling import (
    LONGEST_PAUSE_S,
    REST_PER_SWEEP,
    SHORTEST_PAUSE_S,
    Pace,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 5000), st.floats(0, 10), st.floats(0, 5))
    )
)
def test_pauses_stay_between_their_limits_whatever_happens(
    sweeps: list[tuple[int, int, float, float]],
) -> None:
    pace = Pace()
    for in_flight, found, since_s, sweep_s in sweeps:
        pause_s = pace.pause_s(
            in_flight=in_flight, found=found, announced=0, since_s=since_s, sweep_s=sweep_s
        )
        assert SHORTEST_PAUSE_S <= pause_s <= max(LONGEST_PAUSE_S, sweep_s)


def test_a_fast_queue_is_asked_often_enough_to_stay_full() -> None:
    pace = Pace()
    for _ in range(20):  # 10,000 results per second, 1,000 jobs in dispatched.
        pause_s = pace.pause_s(in_flight=1000, found=100, announced=0, since_s=0.01, sweep_s=0.001)
    assert pause_s == pytest.approx(1000 / 8 / 10_000)


def pause_s(pace: Pace, *, in_flight: int, found: int, since_s: float) -> float:
    return pace.pause_s(in_flight=in_flight, found=found, announced=0, since_s=since_s, sweep_s=0)


def test_pauses_grow_while_nothing_comes_and_shrink_when_something_does() -> None:
    pace = Pace()
    pauses = [
        pace.pause_s(in_flight=10, found=0, announced=0, since_s=1, sweep_s=0) for _ in range(30)
    ]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    assert (
        pace.pause_s(in_flight=8, found=100, announced=0, since_s=0.1, sweep_s=0)
        == SHORTEST_PAUSE_S
    )


def test_where_results_are_announced_sweeps_are_rare_and_take_a_tenth_of_the_time() -> None:
    pace = Pace()
    long_s = pace.pause_s(in_flight=9000, found=3, announced=5000, since_s=1, sweep_s=0.1)
    assert long_s == pytest.approx(0.1 * REST_PER_SWEEP)
    short_s = pace.pause_s(in_flight=9000, found=0, announced=5000, since_s=1, sweep_s=0.001)
    assert short_s == LONGEST_PAUSE_S
