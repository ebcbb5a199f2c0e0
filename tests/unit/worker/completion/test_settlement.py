"""What threads hand to the loop arrives, whichever loop it is by then."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery
from kombu.asynchronous import Hub

from batchery_worker.commit.listeners import Listeners
from batchery_worker.completion.settlement import Settlement
from batchery_worker.in_flight import InFlight
from batchery_worker.metrics import Metrics

app = Celery("settled", broker="memory://", backend="cache+memory://", set_as_current=False)


@pytest.fixture
def hubs() -> Iterator[list[Any]]:
    made = [Hub(), Hub()]
    yield made
    for hub in made:
        hub.close()


def settlement(hub: Any) -> Settlement:
    return Settlement(app, 1, Metrics(), InFlight(), Listeners(), hub)


def turn(hub: Any, until: Callable[[], bool]) -> None:
    """Runs a loop that has a timer, as Celery's always has."""
    deadline_s = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline_s, "nothing arrived"
        hub.run_once()


def count(made: Settlement, seen: list[int], calls: int) -> None:
    """What a completion thread does, and nothing else."""
    for number in range(calls):
        made.deliver(partial(seen.append, number))


def test_calls_of_one_thread_arrive_in_order(hubs: list[Any]) -> None:
    made, seen = settlement(hubs[0]), list[int]()
    threading.Thread(target=count, args=(made, seen, 99)).start()
    turn(hubs[0], lambda: len(seen) == 99)
    assert seen == list(range(99))


def test_call_delivered_to_the_last_loop_arrives_on_the_next_one(hubs: list[Any]) -> None:
    made, seen = settlement(hubs[0]), list[str]()
    made.deliver(partial(seen.append, "before"))
    made.attach(hubs[1])
    turn(hubs[1], lambda: bool(seen))
    made.deliver(partial(seen.append, "after"))
    turn(hubs[1], lambda: len(seen) == 2)
    assert seen == ["before", "after"]


def test_no_call_is_lost_while_the_loop_changes(hubs: list[Any]) -> None:
    made, seen = settlement(hubs[0]), list[int]()
    thread = threading.Thread(target=count, args=(made, seen, 2_000))
    thread.start()
    for number in range(20):
        made.attach(hubs[number % 2])
        hubs[number % 2].run_once()
    thread.join()
    turn(hubs[1], lambda: len(seen) == 2_000)


def test_a_call_that_raises_does_not_stop_the_others(
    hubs: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made, seen = settlement(hubs[0]), list[int]()

    def broken() -> None:
        raise OSError("Celery would take it for a lost broker")

    made.deliver(broken)
    made.deliver(partial(seen.append, 1))
    turn(hubs[0], lambda: bool(seen))
    assert "settling a job failed" in caplog.text


def test_loop_turns_again_soon_after_a_delivered_call(hubs: list[Any]) -> None:
    """Celery acknowledges in the loop's next turn: an idle loop must not wait for an event."""
    made, acknowledged = settlement(hubs[0]), list[float]()
    hubs[0].call_repeatedly(10.0, lambda: None)

    def settle() -> None:
        settled_s = time.monotonic()
        hubs[0].call_soon(lambda: acknowledged.append(time.monotonic() - settled_s))

    quiet, silent = socket.socketpair()
    with quiet, silent:
        # Something to wait for: a loop without descriptors does not wait.
        hubs[0].add_reader(quiet, lambda: None)
        made.deliver(settle)
        turn(hubs[0], lambda: bool(acknowledged))
    assert acknowledged[0] < 0.9
