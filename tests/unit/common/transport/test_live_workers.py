"""Whether somebody consumes, by what Redis knows of workers and connections."""

import pytest

from batchery.transport.live_workers import (
    RegisteredWorker,
    list_queues,
    read_held,
)


def test_queues_of_a_worker_are_known_if_it_says_so() -> None:
    assert list_queues(b'{"queues": ["a", "b"]}') == {"a", "b"}
    assert [list_queues(each) for each in (b"{}", b"{", b'{"queues": 1}', None)] == [None] * 4


def test_worker_is_dead_once_it_was_silent_for_as_long_as_its_leases_live() -> None:
    def is_dead(expiry_s: float | None, silent_s: float) -> bool:
        return RegisteredWorker(expiry_s, None, silent_s=silent_s).is_dead

    assert [is_dead(8.0, silent_s) for silent_s in (0.0, 7.9, 8.0, 9.0)] == [
        False,
        False,
        True,
        True,
    ]
    # Of one that does not say, its own default holds.
    assert [is_dead(None, silent_s) for silent_s in (4.9, 5.0)] == [False, True]
    # Its clock may be behind that of the Redis before.
    assert not is_dead(5.0, -3.0)


@pytest.mark.parametrize("about", [b"{", b"[]", b'{"leased": 3}', b'{"leased": {"q": "x"}}'])
def test_worker_that_says_nonsense_holds_nothing(about: bytes) -> None:
    assert read_held(about) == ({}, 0)
