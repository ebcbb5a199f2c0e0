from batchery_producer.publishing.publisher import LONGEST_S, SHORTEST_S, UNKNOWN_S, Room


def test_before_anything_was_taken_a_hint_is_a_guess() -> None:
    room = Room()
    assert room.retry_after_s(10) == UNKNOWN_S
    room.saw(1.0, 100, 100)
    assert room.retry_after_s(10) == UNKNOWN_S


def test_a_hint_follows_the_rate_at_which_jobs_are_taken() -> None:
    room = Room()
    room.saw(1.0, 100, 100)
    room.saw(2.0, 100, 50)  # 50 a second
    assert room.retry_after_s(100) == 2.0
    assert room.retry_after_s(1) == 0.02
    assert room.retry_after_s(10_000) == LONGEST_S


def test_where_nothing_moves_it_is_asked_seldom() -> None:
    room = Room()
    room.saw(1.0, 100, 100)
    room.saw(2.0, 100, 0)
    assert room.retry_after_s(1) == LONGEST_S


def test_two_looks_at_once_are_one() -> None:
    room = Room()
    room.saw(1.0, 100, 100)
    room.saw(1.0 + SHORTEST_S / 2, 190, 100)
    room.saw(2.0, 150, 0)
    assert room.retry_after_s(50) == 1.0
