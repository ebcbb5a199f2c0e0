from batchery_producer.publisher import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    UNKNOWN_RATE_S,
    Backpressure,
)


def test_retry_after_with_unknown_rate_is_a_second() -> None:
    backpressure = Backpressure()
    assert backpressure.retry_after_s(10) == UNKNOWN_RATE_S
    backpressure.observe(1.0, 100, 100)
    assert backpressure.retry_after_s(10) == UNKNOWN_RATE_S


def test_retry_after_follows_the_rate_at_which_jobs_are_taken() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(2.0, 100, 50)  # 50 a second
    assert backpressure.retry_after_s(100) == 2.0
    assert backpressure.retry_after_s(1) == 0.02
    assert backpressure.retry_after_s(10_000) == MAX_RETRY_AFTER_S


def test_retry_after_of_a_stalled_queue_is_the_maximum() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(2.0, 100, 0)
    assert backpressure.retry_after_s(1) == MAX_RETRY_AFTER_S


def test_backpressure_observed_twice_at_once_counts_the_next_interval() -> None:
    backpressure = Backpressure()
    backpressure.observe(1.0, 100, 100)
    backpressure.observe(1.0 + MIN_RETRY_AFTER_S / 2, 190, 100)
    backpressure.observe(2.0, 150, 0)
    assert backpressure.retry_after_s(50) == 1.0
