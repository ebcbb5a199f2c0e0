"""The reader of piece streams against real servers: what wakes bring, and what they do not."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from celery import Celery

from batchery.protocol.pieces import MAX_WAKES
from batchery_producer import piece_reader
from batchery_producer.piece_reader import (
    MAX_BACKLOG,
    NOTHING_FETCHED,
    Event,
    PieceReader,
    Question,
    Reply,
)
from support.harness import wait_for

STREAMS = 20


class Caller:
    """Who reads one stream."""

    loop: asyncio.AbstractEventLoop | None = None
    keep_s: int | None = None

    def __init__(self, task_id: str) -> None:
        self.id = task_id
        self.key = b""
        self.fetched = NOTHING_FETCHED
        self.saw_end = False
        self.is_known = True
        self.backlog = 0
        self.events: list[Event] = []

    @property
    def values(self) -> list[Any]:
        return [getattr(each, "value", each) for each in self.events]

    def give(self, events: Sequence[Event]) -> None:
        """As `Following.give`."""
        self.events += events


class Noting(PieceReader):
    """Notes what it was told."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.replies: list[Reply] = []

    def _ask(self, question: Question) -> Reply:
        reply = super()._ask(question)
        self.replies.append(reply)
        return reply

    @property
    def looked_up(self) -> int:
        """How many streams it has found something in, itself."""
        return sum(len(each.entries) for each in self.replies)


class Device:
    """Writes as devices do."""

    def __init__(self, url: str, reader: Noting) -> None:
        self.server: Any = redis.Redis.from_url(url)
        self.reader = reader

    def add(self, pieces: dict[str, list[Any]], first: int = 1) -> None:
        """Adds pieces to the streams of jobs."""
        with self.server.pipeline(transaction=True) as step:
            for task_id, each in pieces.items():
                for number, piece in enumerate(each, first):
                    entry = {"p": json.dumps(piece)}
                    step.xadd(f"batchery-pieces:{task_id}", entry, id=f"{number}-0")
            step.execute()

    def wake(self, texts: dict[str, Any]) -> None:
        """Adds an entry to the wake stream: JSON, or a text as it is."""
        (key,) = self.server.smembers(f"batchery-woken:{next(iter(texts))}")
        told = (text if isinstance(text, str) else json.dumps(text) for text in texts.values())
        entry: dict[Any, Any] = {
            "k": "\n".join(f"batchery-pieces:{task_id}" for task_id in texts),
            "p": ",".join(told),
        }
        self.server.xadd(key, entry, maxlen=MAX_WAKES, approximate=False)

    def is_awaited(self) -> bool:
        """Whether the reader waits for a wake."""
        return bool(self.server.info("clients")["blocked_clients"])


@pytest.fixture
def reader(url: str) -> Iterator[Noting]:
    app = Celery("reader", backend=url, set_as_current=False)
    made = Noting(app)
    yield made
    made.close()


@pytest.fixture
def device(url: str, reader: Noting) -> Iterator[Device]:
    made = Device(url, reader)
    yield made
    made.server.close()


@pytest.fixture
def rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader looks for nothing of which no wake has told, but for once."""
    monkeypatch.setattr(piece_reader, "LOOK_S", 3600.0)


def open_streams(reader: Noting, device: Device, count: int) -> list[Caller]:
    """Opens streams; the reader has looked for the first time, and waits for a wake."""
    callers = [Caller(f"job-{number}") for number in range(count)]
    reader.open(callers)
    wait_for(device.is_awaited, "the reader waits")
    return callers


def test_what_a_step_has_made_comes_with_one_wake(
    rare: None, reader: Noting, device: Device
) -> None:
    callers = open_streams(reader, device, STREAMS)
    for number in range(1, 11):
        wait_for(device.is_awaited, "the reader waits")
        reader.replies.clear()
        device.add({each.id: [number] for each in callers}, number)
        device.wake({each.id: [number, number] for each in callers})
        wait_for(lambda: all(each.fetched == (number, 0) for each in callers), "all came")  # noqa: B023
        assert [len(each.wakes) for each in reader.replies if each.wakes] == [STREAMS]
        assert reader.looked_up == 0
    assert [each.values for each in callers] == [list(range(1, 11))] * STREAMS
    assert [event.id for event in callers[0].events][:2] == ["1-0", "2-0"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[3, 3]",
        "[1]",
        "[0, 1, 2, 3]",
        "[-5, 1]",
        "[true, 1]",
        "[1.0, 1]",
        "[]",
        "{}",
        "7",
        "null",
        '"ab"',
        '["a", 1]',
        "[[1], 1]",
        "[1, ",
        "[" * 10_000,
        "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_wake_without_the_next_piece_has_the_stream_read(
    rare: None, reader: Noting, device: Device, text: str
) -> None:
    """One with pieces after a gap, one with none, and whatever a hostile producer may write."""
    caller, other = open_streams(reader, device, 2)
    device.add({caller.id: [1, 2, 3], other.id: ["a"]})
    device.wake({caller.id: text, other.id: [1, "a"], "no-such-job": [1, 1]})
    wait_for(lambda: len(caller.events) >= 3 and other.events, "they came")
    assert (caller.values, other.values) == ([1, 2, 3], ["a"])
    device.wake({caller.id: [3, "again", 4]})
    wait_for(lambda: len(caller.events) >= 4, "the next one came")
    assert (caller.values, caller.fetched) == ([1, 2, 3, 4], (4, 0))


def test_pieces_for_which_a_reader_has_no_room_wait_in_redis(
    rare: None, reader: Noting, device: Device
) -> None:
    caller, other = open_streams(reader, device, 2)
    caller.backlog = MAX_BACKLOG
    device.add({caller.id: [1, 2], other.id: ["a"]})
    device.wake({caller.id: [1, 1, 2], other.id: [1, "a"]})
    wait_for(lambda: other.events, "the other one goes on")
    assert caller.events == []
    caller.backlog = 0
    wait_for(lambda: caller.values == [1, 2], "they came")


def test_pieces_come_without_wakes(reader: Noting, device: Device) -> None:
    """As from a worker that knows of none."""
    (caller,) = open_streams(reader, device, 1)
    device.add({caller.id: ["a", "b"]})
    wait_for(lambda: caller.values == ["a", "b"], "they came")
