import threading
import time
from collections.abc import Iterator

import pytest

from batchery_producer.files.run import Feed


def take_all(feed: Feed[int], most: int = 7) -> list[int]:
    taken: list[int] = []
    deadline_s = time.monotonic() + 60
    while not feed.exhausted:
        assert time.monotonic() < deadline_s
        taken += feed.take(most, wait_s=0.1)
    return taken


def test_feed_returns_each_entry_once_and_in_order() -> None:
    assert take_all(Feed(range(1000), ahead=10)) == list(range(1000))


def test_feed_reads_no_further_ahead_than_its_maximum_and_then_closes_its_source_there() -> None:
    read: list[int] = []
    threads: list[int] = []
    blocked, closed = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        threads.append(threading.get_ident())
        try:
            for number in range(100):
                read.append(number)
                if number == 6:
                    blocked.set()
                yield number
        finally:
            threads.append(threading.get_ident())
            closed.set()

    feed = Feed(source(), ahead=5)
    assert feed.take(1, wait_s=60) == [0]
    assert blocked.wait(60)
    assert len(read) <= 7
    feed.close()
    assert closed.wait(60)
    assert threads[0] == threads[1] != threading.get_ident()


def test_feed_returns_what_is_there_while_its_source_waits_and_then_its_error() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        gate.wait(60)
        yield 2
        raise OSError("the disk is gone")

    feed = Feed(source(), ahead=5)
    assert feed.take(9, wait_s=60) == [1]
    assert feed.take(9) == []
    assert not feed.exhausted
    gate.set()
    assert feed.take(1, wait_s=60) == [2]
    with pytest.raises(OSError, match="the disk is gone"):
        take_all(feed)
