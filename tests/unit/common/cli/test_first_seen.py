"""Jobs that do not say when they were sent are as old as they were seen next in turn."""

from batchery.cli.survey import FirstSeen, Survey


def test_job_without_a_time_ages_as_long_as_it_is_next() -> None:
    now_s = [100.0]
    seen = FirstSeen(lambda: now_s[0])

    def age(*heads: bytes, sent_s: float | None = None) -> float | None:
        survey = Survey({}, {"a": 3}, oldest_s={"a": sent_s}, undated={"a": heads})
        return seen.date(survey).oldest_s["a"]

    assert age() is None
    assert age(b"1") == 0
    now_s[0] += 30
    # Those of another priority are next as well.
    assert age(b"2", b"1") == 30
    assert age(b"2", b"1", sent_s=70) == 70
    now_s[0] += 10
    assert age(b"2", sent_s=5) == 10
    assert age(b"3") == 0
    assert age() is None
    assert not seen._seen_s
