"""The writer of pieces against real servers: what is written, what is refused, what comes again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from batchery import (
    Client,
    Failed,
    NoResult,
    UnserialisableResult,
)
from batchery.protocol.pieces import MAX_WAKES, READER_S
from batchery.transport.lease_store import LeaseStore
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.device.pieces import PieceWriter
from batchery_worker.work import PieceContext, Work
from support.harness import wait_for
from support.own_redis import OwnRedis
from support.patience import patient

LEASES = "batchery:lease:me"


class Pen:
    """A writer whose results are in database 0, and whose leases in database 1."""

    def __init__(self, url: str) -> None:
        self.app = Celery("pen", backend=url, set_as_current=False)
        self.results: Any = redis.Redis.from_url(url)
        self.leases: Any = redis.Redis.from_url(f"{url[:-1]}1")
        self.leases.zadd("batchery:workers", {"me": 1})
        self.leases.hset(LEASES, "7", "celery\0message")
        store = LeaseStore(self.leases, "", 5.0)
        store.worker, store.lease_key = "me", LEASES
        self.leased = PieceContext({0: "7"}, resumed=(), max_pieces=1000, grace_s=30, store=store)
        self.writer = PieceWriter(self.app.backend)
        self._works: list[Work] = []

    def stream(self) -> None:
        """As a client does it."""
        self.results.xadd("batchery-pieces:job", {"begin": ""}, id="0-1")
        self.results.set("batchery-reader:job", "", ex=READER_S)

    def wake(self, reader: str = "me", key: str | None = None) -> None:
        """As a reader does it that wants to be woken."""
        self.results.xadd(f"batchery-wake:{reader}", {"": ""})
        self.results.sadd("batchery-woken:job", key or f"batchery-wake:{reader}")

    def wakes(self, reader: str = "me") -> list[bytes]:
        return [entry[b"k"] for _, entry in self.results.xrange(f"batchery-wake:{reader}")[1:]]

    def work(self, context: PieceContext | None = None, task_id: str = "job") -> Work:
        number, pieces = len(self._works) + 1, context or self.leased
        work = Work(number, "task", {}, [(task_id, ["item"], False)], 8, None, pieces=pieces)
        self._works.append(work)
        return work

    def close(self) -> None:
        """Has the writer's thread ask this server for nothing more."""
        for work in self._works:
            self.writer.end(work, [CommitStatus.NEEDS_TRACER.value])
        self.results.close()
        self.leases.close()

    def write(self, work: Work, *pieces: Any) -> None:
        assert self.writer.write({work.id: pieces}) == {}
        self.writer.flush(work)

    def refusal(self) -> Any:
        return wait_for(lambda: self.writer.write({}), "it is refused")

    def written(self) -> list[tuple[str, str]]:
        entries = self.results.xrange("batchery-pieces:job")
        return [(id_.decode(), entry[b"p"].decode()) for id_, entry in entries if b"p" in entry]


@pytest.fixture
def pen(url: str) -> Iterator[Pen]:
    made = Pen(url)
    yield made
    made.close()


def test_readers_are_woken_where_something_has_come(pen: Pen) -> None:
    pen.stream()
    pen.wake()
    pen.wake("other")
    work = pen.work()
    pen.writer.read(work)
    pen.write(work, "a", {"b": [1.5, None]})
    pen.write(work, "c")
    assert pen.wakes() == pen.wakes("other") == [b"batchery-pieces:job"] * 2
    pen.writer.end(work, ["committed"])
    assert pen.wakes()[2:] == [b"batchery-pieces:job"]


def test_only_wake_streams_that_are_there_are_written_and_bounded(pen: Pen) -> None:
    """Whoever sends jobs may name any key, and may have gone without a word."""
    pen.stream()
    pen.wake()
    for name in ("celery", "batchery-pieces:other", "batchery-wake:gone", "batchery-wake:list"):
        pen.results.sadd("batchery-woken:job", name)
    pen.results.xadd("batchery-pieces:other", {"begin": ""}, id="0-1")
    pen.results.lpush("batchery-wake:list", "no stream")
    work = pen.work()
    pen.writer.read(work)
    for number in range(30):
        pen.write(work, number)
    assert len(pen.written()) == 30
    assert pen.results.xlen("batchery-pieces:other") == 1
    assert not pen.results.exists("celery", "batchery-wake:gone")
    assert pen.results.xlen("batchery-wake:me") == MAX_WAKES


def test_a_job_whose_lease_is_lost_writes_nothing_and_leaves(pen: Pen) -> None:
    pen.stream()
    work = pen.work()
    pen.writer.read(work)
    pen.write(work, "a")
    pen.leases.hdel(LEASES, "7")
    pen.write(work, "b")
    assert pen.written() == [("1-0", '"a"')]
    assert pen.refusal() == {work.id: CommitStatus.FENCED}


@pytest.mark.parametrize(
    "go",
    [
        lambda pen: pen.delete("batchery-reader:job"),
        lambda pen: pen.expire("batchery-reader:job", READER_S - 31),
    ],
)
def test_a_job_whose_readers_have_gone_leaves_though_it_makes_no_piece(
    pen: Pen, go: Callable[[Any], None]
) -> None:
    pen.stream()
    work = pen.work()
    pen.writer.read(work)
    go(pen.results)
    assert pen.refusal() == {work.id: CommitStatus.REVOKED}


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    with OwnRedis(tmp_path / "redis") as server:
        yield server


def test_what_is_sent_again_is_there_once_and_a_job_goes_on_after_it(pen: Pen) -> None:
    pen.stream()
    first = pen.work()
    pen.writer.read(first)
    pen.write(first, "a", "b")
    anew = pen.work()
    assert pen.writer.read(anew) == []
    pen.write(anew, "a", "b", "c")
    resumed = pen.work(replace(pen.leased, resumed=["job"]))
    assert pen.writer.read(resumed) == ["a", "b", "c"]
    pen.write(resumed, "d")
    assert [number for number, _ in pen.written()] == ["1-0", "2-0", "3-0", "4-0"]
    assert [piece for _, piece in pen.written()] == ['"a"', '"b"', '"c"', '"d"']


def test_a_job_whose_first_pieces_were_dropped_begins_anew(pen: Pen) -> None:
    pen.stream()
    work = pen.work(replace(pen.leased, max_pieces=1))
    pen.writer.read(work)
    for number in range(300):
        pen.write(work, number)
    assert len(pen.written()) < 300
    assert pen.writer.read(pen.work(replace(pen.leased, resumed=["job"]))) == []


@pytest.mark.parametrize(
    "piece", ["{no json", "[" * 100_000, b"\xff", '{"__type__": "uuid", "__value__": 5}', None]
)
def test_a_stream_in_which_others_wrote_what_is_no_piece_is_that_of_a_new_job(
    pen: Pen, piece: Any
) -> None:
    if piece is None:
        pen.results.set("batchery-pieces:job", "no stream")
    else:
        pen.stream()
        pen.results.xadd("batchery-pieces:job", {"p": piece}, id="1-0")
    assert pen.writer.read(pen.work(replace(pen.leased, resumed=["job"]))) == []


def test_without_leases_pieces_are_written_all_the_same(pen: Pen) -> None:
    """As where the broker is RabbitMQ."""
    pen.stream()
    work = pen.work(PieceContext({0: ""}, (), 1000, 30))
    pen.writer.read(work)
    pen.write(work, "a")
    assert pen.written() == [("1-0", '"a"')]


def test_a_piece_that_json_cannot_write_fails_its_job_alone(pen: Pen) -> None:
    pen.stream()
    good, bad = pen.work(), pen.work(task_id="other")
    for each in (good, bad):
        pen.writer.read(each)
    refused = pen.writer.write({good.id: ["a"], bad.id: [object()]})
    (failed,) = refused.values()
    assert isinstance(failed, Failed)
    assert list(refused) == [bad.id]
    assert isinstance(failed.error, UnserialisableResult)
    pen.writer.flush(good)
    assert pen.written() == [("1-0", '"a"')]


@pytest.mark.parametrize("later", [[], ["c", "d"]])
def test_pieces_that_redis_refuses_leave_a_gap_for_their_readers(
    pen: Pen, monkeypatch: pytest.MonkeyPatch, later: list[str]
) -> None:
    pen.stream()
    work = pen.work()
    pen.writer.read(work)
    pen.write(work, "a")
    call, refusals = pen.writer._call, [redis.ResponseError("no")]

    def call_later(context: Any, taken: Any, *args: Any) -> str | None:
        if refusals and any(pieces for _, pieces in taken.values()):
            raise refusals.pop()
        return call(context, taken, *args)

    monkeypatch.setattr(pen.writer, "_call", call_later)
    pen.write(work, "b")
    pen.write(work, *later)
    pen.writer.end(work, ["committed"])
    app = Celery("reader", backend=pen.app.conf.result_backend, set_as_current=False)
    with app, Client(app) as client, pytest.raises(NoResult, match="pieces 2 to 3 were dropped"):
        list(client.follow("job", timeout_s=patient(30)))
