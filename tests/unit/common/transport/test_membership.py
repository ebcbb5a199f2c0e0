from collections.abc import Iterable

import pytest

from batchery.transport.membership import FailureDetector

EXPIRY_S = 5.0


@pytest.fixture
def detector() -> FailureDetector:
    return FailureDetector(EXPIRY_S, max_gap_s=2.5)


def dead(
    detector: FailureDetector, looks: Iterable[tuple[float, dict[str, int]]]
) -> list[list[str]]:
    """Who is found dead at each look."""
    return [[name for name, _ in detector.observe(beats, now_s)] for now_s, beats in looks]


def test_worker_is_dead_after_an_unchanged_heartbeat_for_a_full_expiry(
    detector: FailureDetector,
) -> None:
    looks = [(second, {"silent": 7, "alive": second}) for second in range(6)]
    assert dead(detector, looks) == [[], [], [], [], [], ["silent"]]


@pytest.mark.parametrize("jump_ms", [10**12, -(10**12)])
def test_jump_of_the_server_s_clock_makes_no_worker_dead(
    detector: FailureDetector, jump_ms: int
) -> None:
    looks = [(s, {"alive": 1000 * s + (jump_ms if s > 3 else 0)}) for s in range(20)]
    assert dead(detector, looks) == [[]] * 20


def test_gap_between_observations_restarts_all_expiries(detector: FailureDetector) -> None:
    looks = [(second, {"silent": 7}) for second in (0, 1, 2, 3, 4)]
    looks += [(second, {"silent": 7}) for second in (7, 8, 9, 10, 11, 12)]
    assert dead(detector, looks) == [[]] * 10 + [["silent"]]


def test_undisturbed_time_counts_from_the_last_interruption(detector: FailureDetector) -> None:
    detector.observe({}, 0)
    assert detector.undisturbed_s(0) == float("inf")
    detector.reset()
    assert detector.undisturbed_s(1) == 0
    detector.observe({}, 2)
    detector.observe({}, 3)
    assert detector.undisturbed_s(3) == 1
    detector.observe({}, 30)
    assert detector.undisturbed_s(30) == 0


def test_each_worker_has_its_own_expiry(detector: FailureDetector) -> None:
    found = [
        detector.observe({"short": 1, "long": 1, "silent": 1}, second, {"short": 2, "long": 8})
        for second in range(9)
    ]
    first = {name: next(s for s in range(9) if (name, 1) in found[s]) for name, _ in found[8]}
    assert first == {"short": 2, "silent": 5, "long": 8}


# Heartbeats
