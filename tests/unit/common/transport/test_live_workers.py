"""Whether somebody consumes, by what Redis knows of workers and connections."""

import pytest

from batchery.transport.live_workers import RegisteredWorker, read_worker


def test_worker_says_what_it_is() -> None:
    about = b'{"expiry_s": 2.5, "queues": ["a", "b"], "name": "w1@host", "pid": 7}'
    assert read_worker(about, 3.0) == RegisteredWorker(2.5, {"a", "b"}, "w1@host", silent_s=3.0)


@pytest.mark.parametrize(
    "about",
    [
        *(b"{}", b"{", b"[]", b"[" * 100_000, b"\xff", None),
        *(b'{"expiry_s": 0}', b'{"expiry_s": "soon"}', b'{"queues": 1}', b'{"name": 1}'),
        *(b'{"leased": 3}', b'{"leased": {"q": "x"}}'),
    ],
)
def test_nothing_is_known_of_a_worker_that_says_nonsense(about: bytes | None) -> None:
    assert read_worker(about) == RegisteredWorker()


def test_worker_is_dead_once_it_was_silent_for_as_long_as_its_leases_live() -> None:
    def is_dead(expiry_s: float | None, silent_s: float) -> bool:
        return RegisteredWorker(expiry_s, silent_s=silent_s).is_dead

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
