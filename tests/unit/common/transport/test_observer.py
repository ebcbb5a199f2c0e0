from collections.abc import Iterable

import pytest

from batchery.transport.observer import Observer

EXPIRY_S = 5.0


@pytest.fixture
def observer() -> Observer:
    return Observer(EXPIRY_S, max_gap_s=2.5)


def dead(observer: Observer, looks: Iterable[tuple[float, dict[str, int]]]) -> list[list[str]]:
    """Who is found dead at each look."""
    return [[name for name, _ in observer.look(beats, now_s)] for now_s, beats in looks]


def test_unchanged_for_a_full_expiry_is_dead_and_no_sooner(observer: Observer) -> None:
    looks = [(second, {"silent": 7, "alive": second}) for second in range(6)]
    assert dead(observer, looks) == [[], [], [], [], [], ["silent"]]


def test_the_dead_are_told_with_the_heartbeat_that_was_seen(observer: Observer) -> None:
    for second in range(5):
        observer.look({"silent": 7}, second)
    assert observer.look({"silent": 7}, 5) == [("silent", 7)]


def test_one_more_heartbeat_starts_the_time_anew(observer: Observer) -> None:
    looks = [(second, {"slow": second // 4}) for second in range(10)]
    assert dead(observer, looks) == [[]] * 9 + [[]]
    assert dead(observer, [(second, {"slow": 2}) for second in range(10, 14)])[-1] == ["slow"]


@pytest.mark.parametrize("jump_ms", [10**12, -(10**12)])
def test_a_jump_of_the_servers_clock_kills_nobody(observer: Observer, jump_ms: int) -> None:
    looks = [(s, {"alive": 1000 * s + (jump_ms if s > 3 else 0)}) for s in range(20)]
    assert dead(observer, looks) == [[]] * 20


def test_old_heartbeats_say_nothing_to_who_has_just_come(observer: Observer) -> None:
    assert dead(observer, [(1e6, {"silent": 1})]) == [[]]


def test_a_gap_starts_everything_anew(observer: Observer) -> None:
    looks = [(second, {"silent": 7}) for second in (0, 1, 2, 3, 4)]
    looks += [(second, {"silent": 7}) for second in (7, 8, 9, 10, 11, 12)]
    assert dead(observer, looks) == [[]] * 10 + [["silent"]]


def test_an_interruption_starts_everything_anew(observer: Observer) -> None:
    for second in range(5):
        observer.look({"silent": 7}, second)
    observer.interrupted()
    looks = [(second, {"silent": 7}) for second in range(5, 11)]
    assert dead(observer, looks) == [[]] * 5 + [["silent"]]


def test_who_left_and_came_again_is_new(observer: Observer) -> None:
    for second in range(3):
        observer.look({"worker": 7}, second)
    observer.look({}, 3)
    looks = [(second, {"worker": 7}) for second in range(4, 9)]
    assert dead(observer, looks) == [[]] * 5


def test_calm_is_counted_from_the_last_interruption(observer: Observer) -> None:
    observer.look({}, 0)
    assert observer.calm_s(0) == float("inf")
    observer.interrupted()
    assert observer.calm_s(1) == 0
    observer.look({}, 2)
    observer.look({}, 3)
    assert observer.calm_s(3) == 1
    observer.look({}, 30)
    assert observer.calm_s(30) == 0


def test_each_is_judged_by_its_own_expiry(observer: Observer) -> None:
    found = [
        observer.look({"short": 1, "long": 1, "silent": 1}, second, {"short": 2, "long": 8})
        for second in range(9)
    ]
    first = {name: next(s for s in range(9) if (name, 1) in found[s]) for name, _ in found[8]}
    assert first == {"short": 2, "silent": 5, "long": 8}
