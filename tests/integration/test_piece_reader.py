"""The reader of piece streams against real servers: what wakes bring, and what they do not."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import redis
from celery import Celery

from batchery.protocol.pieces import MAX_WAKES
from batchery_producer import piece_reader
from batchery_producer.piece_reader import PieceReader
from batchery_producer.piece_stream import PieceStream
from support.harness import wait_for

STREAMS = 20


class Noting(PieceReader):
    """Notes what it has asked for."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.asked: list[Sequence[Any]] = []

    def _send(self, commands: Sequence[Any]) -> list[Any]:
        self.asked += commands
        return super()._send(commands)

    @property
    def reads(self) -> list[int]:
        """How many streams each command has read."""
        return [(len(each) - 4) // 2 for each in self.asked if each[:2] == ("XREAD", "COUNT")]


class Device:
    """Writes as devices do."""

    def __init__(self, url: str) -> None:
        self.server: Any = redis.Redis.from_url(url)

    def add(self, pieces: dict[str, list[Any]], first: int = 1) -> None:
        """Adds pieces to the streams of jobs."""
        with self.server.pipeline(transaction=True) as step:
            for task_id, each in pieces.items():
                for number, piece in enumerate(each, first):
                    entry = {"p": json.dumps(piece)}
                    step.xadd(f"batchery-pieces:{task_id}", entry, id=f"{number}-0")
            step.execute()

    def wake(self, streams: Sequence[PieceStream], *others: str) -> None:
        """Adds an entry to the wake stream that names these jobs."""
        (key,) = self.server.smembers(f"batchery-woken:{streams[0].id}")
        keys = [f"batchery-pieces:{each.id}" for each in streams]
        entry: Any = {"k": "\n".join([*keys, *others])}
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
    made = Device(url)
    yield made
    made.server.close()


@pytest.fixture
def rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader looks for nothing of which no wake has told, but for once."""
    monkeypatch.setattr(piece_reader, "LOOK_S", 3600.0)


def open_streams(reader: Noting, device: Device, count: int) -> list[PieceStream]:
    """Opens streams; the reader has looked for the first time, and waits for a wake."""
    streams = [PieceStream(reader, f"job-{number}", timeout_s=60) for number in range(count)]
    reader.open(streams)
    wait_for(device.is_awaited, "the reader waits")
    return streams


def test_what_a_step_has_made_is_read_at_once(rare: None, reader: Noting, device: Device) -> None:
    streams = open_streams(reader, device, STREAMS)
    for number in range(1, 11):
        wait_for(device.is_awaited, "the reader waits")
        reader.asked.clear()
        device.add({each.id: [number] for each in streams}, number)
        device.wake(streams)
        assert [next(each) for each in streams] == [number] * STREAMS
        assert reader.reads == [STREAMS]
    assert streams[0].last_id == "10-0"


@pytest.mark.parametrize("other", ["", "batchery-pieces:no-such-job", "celery", "\udcff"])
def test_whatever_a_wake_names_besides_is_not_read(
    rare: None, reader: Noting, device: Device, other: str
) -> None:
    stream, beside = open_streams(reader, device, 2)
    device.add({stream.id: [1, 2, 3], beside.id: ["a"]})
    reader.asked.clear()
    device.wake([stream], other.encode("utf-8", "surrogatepass").decode("latin-1"))
    assert list(islice(stream, 3)) == [1, 2, 3]
    assert beside.backlog == 0
    device.wake([beside])
    assert next(beside) == "a"
    assert reader.reads == [1, 1]


def test_pieces_for_which_a_reader_has_no_room_wait_in_redis(
    rare: None, reader: Noting, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_reader, "MAX_BACKLOG", 2)
    stream, beside = open_streams(reader, device, 2)
    device.add({stream.id: [1, 2]})
    device.wake([stream])
    wait_for(lambda: stream.backlog == 2, "they came")
    device.add({stream.id: [3, 4]}, first=3)
    device.add({beside.id: ["a"]})
    device.wake([stream, beside])
    assert next(beside) == "a"
    assert stream.backlog == 2
    assert list(islice(stream, 4)) == [1, 2, 3, 4]


def test_pieces_come_without_wakes(reader: Noting, device: Device) -> None:
    """As where a wake is lost."""
    (stream,) = open_streams(reader, device, 1)
    device.add({stream.id: ["a", "b"]})
    assert list(islice(stream, 2)) == ["a", "b"]
