"""The thread of a batcher: what waits there, who gives up, and how it ends."""

import asyncio
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest

from batchery import BatchArgumentError, BatcherClosed, NoResult, QueueFull, batched
from batchery_worker.inprocess import batcher_thread
from support.gate import WAIT_S, Gate
from support.harness import wait_for


def echo(numbers: list[int]) -> list[int]:
    return numbers


def test_a_batch_waits_a_moment_for_threads_that_were_just_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Six seconds or more: longer than a busy machine keeps a thread from calling.
    monkeypatch.setattr(batcher_thread, "MAX_LINGER_SHARE", 6000.0)
    sizes: list[int] = []

    def note(items: list[int]) -> list[int]:
        sizes.append(len(items))
        time.sleep(0.001)  # So long a batch runs.
        return items

    function = batched(note)
    both = threading.Barrier(2)

    def call() -> None:
        both.wait(WAIT_S)
        for number in range(100):
            assert function(number) == number

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sum(sizes) == 200
    # Once they have met, they stay together until one of them is done.
    together = "".join(map(str, sizes)).strip("1")
    assert set(together) == {"2"}


def test_a_closed_batcher_answers_what_is_there_and_takes_no_more(gate: Gate) -> None:
    function = batched(gate, max_batch_size=1, max_wait_ms=3_600_000)
    gate.hold(function)
    futures = [function.submit(number) for number in range(3)]
    closing = threading.Thread(target=function.close)
    closing.start()
    wait_for(lambda: _is_closed(function), "it takes no more")
    gate.opened.set()
    closing.join(WAIT_S)
    assert [each.result(WAIT_S) for each in futures] == ["0!", "1!", "2!"]
    for call in (function, function.submit):
        with pytest.raises(BatcherClosed, match="it is closed"):
            call("late")
    function.close()


def _is_closed(function: Any) -> bool:
    try:
        function([])
    except BatcherClosed:
        return True
    return False


def test_a_cancelled_future_is_dropped_and_its_neighbours_are_not(gate: Gate) -> None:
    function = batched(gate)
    held = gate.hold(function)
    futures = [function.submit(number) for number in range(3)]
    assert futures[1].cancel()
    gate.opened.set()
    assert wait([futures[1]], WAIT_S).done
    assert [futures[0].result(WAIT_S), futures[2].result(WAIT_S)] == ["0!", "2!"]
    with pytest.raises(CancelledError):
        futures[1].result(0)
    assert held.result(WAIT_S) == "held!"
    assert gate.batches == [["held"], [0, 2]]
    assert function.stats.dropped == 1


def test_a_cancelled_coroutine_and_one_that_is_too_late_are_dropped(gate: Gate) -> None:
    function = batched(gate)
    gate.hold(function)

    async def main() -> Any:
        leaver = asyncio.create_task(function.acall("leaver"))
        stayer = asyncio.create_task(function.acall("stayer"))
        with pytest.raises(NoResult, match=r"no result within 0\.05 s"):
            await function.options(timeout_s=0.05).acall("late")
        leaver.cancel()
        await asyncio.wait([leaver])
        gate.opened.set()
        return await stayer

    assert asyncio.run(main()) == "stayer!"
    assert gate.batches == [["held"], ["stayer"]]


def test_a_thread_waits_no_longer_than_it_wants(gate: Gate) -> None:
    function = batched(gate)
    gate.hold(function)
    with pytest.raises(NoResult, match=r"no result within 0\.05 s"):
        function.options(timeout_s=0.05)("late")
    gate.opened.set()
    assert function("next") == "next!"
    assert ["late"] not in gate.batches


def test_a_call_whose_event_loop_has_ended_hurts_nobody(gate: Gate) -> None:
    function = batched(gate)
    gate.hold(function)
    loop = asyncio.new_event_loop()
    task = loop.create_task(function.acall("orphan"))
    loop.run_until_complete(asyncio.sleep(0))
    wait_for(lambda: function.stats.waiting == 1, "it waits")
    loop.close()
    gate.opened.set()
    assert function("next") == "next!"
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_full_queue_refuses(gate: Gate) -> None:
    function = batched(gate, max_waiting=2)
    gate.hold(function)
    futures = [function.submit(number) for number in range(2)]
    with pytest.raises(QueueFull, match="2 items wait, and max_waiting is 2") as caught:
        function.submit(2)
    assert caught.value.retry_after_s > 0
    gate.opened.set()
    assert [each.result(WAIT_S) for each in futures] == ["0!", "1!"]
    assert function(["more", "than", "fits"]) == ["more!", "than!", "fits!"]


def test_a_callback_of_a_future_that_exits_hurts_no_neighbour(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with batched(echo, max_batch_size=2, max_wait_ms=1e15) as function:
        first = function.submit(1)
        first.add_done_callback(lambda _: sys.exit(1))
        second = function.submit(2)
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (1, 2)
    assert "a callback of a future raised" in caplog.text


def test_a_callback_of_a_future_may_submit_and_may_not_wait() -> None:
    function = batched(echo)
    again: Future[Future[int]] = Future()
    told: Future[BaseException | None] = Future()

    def submit(done: "Future[int]") -> None:
        again.set_result(function.submit(done.result() + 1))
        with pytest.raises(BatchArgumentError, match="may only submit") as caught:
            function(3)
        told.set_result(caught.value)

    function.submit(1).add_done_callback(submit)
    assert again.result(WAIT_S).result(WAIT_S) == 2
    assert told.result(WAIT_S) is not None


def test_no_time_is_too_long_to_wait_for() -> None:
    with batched(echo, max_wait_ms=sys.maxsize, max_batch_size=2) as function:
        first = function.submit(1)
        assert function.options(timeout_s=1e300)(2) == 2
        assert first.result(WAIT_S) == 1
