"""What is wrong all the time is logged once a minute."""

from batchery.log_pace import LINE_PAUSE_S, LogPace


def test_each_text_is_due_at_once_and_then_once_a_minute() -> None:
    now_s = [100.0]
    pace = LogPace(lambda: now_s[0])
    assert [pace.is_due(text) for text in ("away", "away", "full", "full")] == [1, 0, 1, 0]
    now_s[0] += LINE_PAUSE_S - 1
    assert not pace.is_due("away")
    now_s[0] += 1
    assert [pace.is_due(text) for text in ("away", "away")] == [1, 0]
    # It remembers no texts of long ago.
    now_s[0] += LINE_PAUSE_S
    assert pace.is_due("other")
    assert len(pace._next_s) == 1
