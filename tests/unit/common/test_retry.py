"""How long somebody waits for a Redis that is away, and what being away means."""

import threading
from math import inf

import pytest
import redis

from batchery import retry
from batchery.errors import GaveUp
from batchery.retry import RetryDeadline, RetryDeadlineExceeded, RetryPolicy, is_away, pause_s

#: How Redis 6.2 begins the error of a command in a script.
SCRIPT_ERROR = "Error running script (call to f_1a15): @user_script:43: @user_script: 43:"


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (redis.ConnectionError("refused"), True),
        (redis.TimeoutError("slow"), True),
        (redis.ReadOnlyError("a replica"), True),
        (redis.OutOfMemoryError("maxmemory"), True),
        (redis.exceptions.MasterDownError("Link with MASTER is down"), True),
        (redis.exceptions.NoPermissionError("this user has no permissions"), False),
        (ConnectionResetError("reset"), True),
        (redis.ResponseError("MISCONF the disk is full"), True),
        (redis.ResponseError("BUSY with a script"), True),
        (redis.ResponseError(f"{SCRIPT_ERROR} -OOM command not allowed when used memory"), True),
        (redis.ResponseError(f"{SCRIPT_ERROR} -READONLY You can't write"), True),
        (redis.ResponseError("Command # 1 (HDEL a) of pipeline caused error: MISCONF full"), True),
        (redis.ResponseError(f"{SCRIPT_ERROR} -WRONGTYPE Operation against a key"), False),
        (redis.ResponseError("WRONGTYPE no list"), False),
        (redis.ResponseError("Error running script: @user_script:9: WRONGTYPE no list"), False),
        (redis.ResponseError("Error running script: @user_script:9: OOM no memory"), True),
        (ValueError("undecodable"), False),
    ],
)
def test_redis_that_is_away_is_told_apart_from_one_that_refuses(
    error: Exception, away: bool
) -> None:
    assert is_away(error) is away


def test_pauses_double_up_to_the_longest() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 6, 1000)] == [0.05, 0.1, 0.2, 1.0, 1.0]
    assert pause_s(7, longest_s=2.0) == 2.0


def test_deadline_counts_from_the_first_failure_and_ends() -> None:
    now_s = 100.0
    pauses: list[float] = []

    def sleep(pause: float) -> None:
        nonlocal now_s
        now_s += pause
        pauses.append(pause)

    deadline = RetryDeadline(5.0, lambda: now_s, sleep)
    now_s += 60.0
    for failures in range(1, 9):
        deadline.wait(failures, "refused")
    with pytest.raises(RetryDeadlineExceeded, match="away for 5 s"):
        deadline.wait(9, "refused")
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1, 1])
    assert deadline.is_exceeded


def test_policy_that_gave_up_waits_again_once_something_has_worked() -> None:
    failures = inf

    def ask() -> str:
        nonlocal failures
        if failures > 0:
            failures -= 1
            raise ConnectionError("refused")
        return "there"

    policy = RetryPolicy(away_s=0.1)
    with pytest.raises(GaveUp):
        policy.call(ask, (ConnectionError,))
    # Nothing else waits for a Redis that is away.
    failures = 1
    with pytest.raises(GaveUp):
        policy.call(ask, (ConnectionError,))
    assert policy.call(ask, (ConnectionError,)) == "there"
    failures = 1
    assert policy.call(ask, (ConnectionError,)) == "there"


def test_attempt_that_hangs_is_seen_though_another_thread_s_has_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "MIN_COMMAND_S", 0.0)
    policy, begun, answered = RetryPolicy(), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        answered.wait()

    hanging = threading.Thread(target=policy.call, args=[hang, (ConnectionError,)])
    hanging.start()
    begun.wait()
    policy.call(lambda: None, (ConnectionError,))
    assert policy.is_away
    answered.set()
    hanging.join()
    assert not policy.is_away
