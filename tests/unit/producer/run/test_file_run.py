import pytest

from batchery_producer.run.file_run import Rate


def test_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate(0.0)
    assert rate.per_second(0.0, 0) == 0
    for second in range(1, 61):
        slow = rate.per_second(float(second), second * 10)
    assert slow == pytest.approx(10)
    for second in range(1, 21):
        fast = rate.per_second(60.0 + second, 600 + second * 100)
    assert fast == pytest.approx(100)
