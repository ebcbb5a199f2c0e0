"""Calls from many threads and coroutines at once, of which some fail, leave or wait too short."""

from benchmarks.inprocess.storm import Storm


def test_each_call_has_one_end_and_nothing_is_left() -> None:
    report = Storm(20_000, seed=7).run()
    assert report.is_good, report
    assert report.calls == 20_000
    assert set(report.ends) == {"answered", "failed", "cancelled", "too late"}
    # What was dropped never ran, and everything else did.
    assert report.stats["dropped"] > 0
    assert report.stats["items"] > 10_000
