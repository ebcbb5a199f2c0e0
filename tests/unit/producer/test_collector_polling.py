import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer.collector import (
    MAX_INTERVAL_S,
    MIN_INTERVAL_S,
    REST_PER_POLL,
    PollingInterval,
)


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 5000), st.floats(0, 10), st.floats(0, 5))
    )
)
def test_polling_interval_stays_between_its_limits(
    polls: list[tuple[int, int, float, float]],
) -> None:
    interval = PollingInterval()
    for in_flight, found, since_s, poll_s in polls:
        next_s = interval.next_s(
            in_flight=in_flight, found=found, announced=0, since_s=since_s, poll_s=poll_s
        )
        assert MIN_INTERVAL_S <= next_s <= max(MAX_INTERVAL_S, poll_s)


def test_polling_interval_follows_the_rate_of_results() -> None:
    interval = PollingInterval()
    for _ in range(20):  # 10,000 results per second, 1,000 jobs in dispatched.
        next_s = interval.next_s(in_flight=1000, found=100, announced=0, since_s=0.01, poll_s=0.001)
    assert next_s == pytest.approx(1000 / 8 / 10_000)


def next_s(interval: PollingInterval, *, in_flight: int, found: int, since_s: float) -> float:
    return interval.next_s(in_flight=in_flight, found=found, announced=0, since_s=since_s, poll_s=0)


def test_polling_interval_grows_without_results_and_shrinks_with_them() -> None:
    interval = PollingInterval()
    pauses = [
        interval.next_s(in_flight=10, found=0, announced=0, since_s=1, poll_s=0) for _ in range(30)
    ]
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_INTERVAL_S
    assert (
        interval.next_s(in_flight=8, found=100, announced=0, since_s=0.1, poll_s=0)
        == MIN_INTERVAL_S
    )


def test_polling_with_announcements_takes_a_tenth_of_the_time() -> None:
    interval = PollingInterval()
    long_s = interval.next_s(in_flight=9000, found=3, announced=5000, since_s=1, poll_s=0.1)
    assert long_s == pytest.approx(0.1 * REST_PER_POLL)
    short_s = interval.next_s(in_flight=9000, found=0, announced=5000, since_s=1, poll_s=0.001)
    assert short_s == MAX_INTERVAL_S
