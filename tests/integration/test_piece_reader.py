"""The reader of piece streams against real servers: how many answers bring what a step has made."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from celery import Celery

from batchery.protocol.pieces import FIRST_ID, NOTHING_READ
from batchery_producer.piece_reader import Event, PieceReader, StreamPiece, gives_all_streams
from support.harness import wait_for

STREAMS = 20


class Caller:
    """Who reads one stream."""

    loop: asyncio.AbstractEventLoop | None = None
    backlog = 0

    def __init__(self, task_id: str) -> None:
        self.id = task_id
        self.key = b""
        self.fetched = NOTHING_READ
        self.saw_end = False
        self.is_known = True
        self.values: list[Any] = []

    def give(self, events: Sequence[Event]) -> None:
        """As `Following.give`."""
        self.values += [each.value for each in events if isinstance(each, StreamPiece)]


class Noting(PieceReader):
    """Notes of how many streams each answer has something."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.answers: list[int] = []

    def _ask(self, *question: Any) -> list[Any]:
        answers = super()._ask(*question)
        self.answers.append(len(answers[-1] or ()))
        return answers


@pytest.fixture
def reader(url: str) -> Iterator[Noting]:
    app = Celery("reader", backend=url, set_as_current=False)
    made = Noting(app)
    yield made
    made.close()


def test_what_a_step_has_made_comes_in_one_answer_on_all_servers(reader: Noting, url: str) -> None:
    server: Any = redis.Redis.from_url(url)
    callers = [Caller(f"job-{number}") for number in range(STREAMS)]
    for each in callers:
        server.xadd(f"batchery-pieces:{each.id}", {"begin": ""}, id=FIRST_ID)
        reader.follow(each)
    wait_for(lambda: all(each.fetched == FIRST_ID for each in callers), "they are followed")

    def is_waiting() -> bool:
        return bool(server.info("clients")["blocked_clients"])

    def have_come() -> bool:
        return all(each.values == list(range(1, number + 1)) for each in callers)

    for number in range(1, 11):
        wait_for(is_waiting, "the reader waits")
        reader.answers.clear()
        with server.pipeline(transaction=True) as step:
            for each in callers:
                step.xadd(f"batchery-pieces:{each.id}", {"p": f"{number}"}, id=f"{number}-0")
            step.execute()
        wait_for(have_come, "all pieces are there")
        assert [each for each in reader.answers if each] == [STREAMS]
    server.close()


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_server_is_known_by_its_version(url: str, protocol: int) -> None:
    with redis.Redis.from_url(url, protocol=protocol) as server:
        info: Any = server.info("server")
        version = tuple(map(int, info["redis_version"].split(".")[:2]))
        assert gives_all_streams(server) == (version >= (7, 2))


@pytest.mark.parametrize(
    "answer", [{}, [], [b"version"], {b"version": b"new"}, {b"version": b"9"}, None, b"OK"]
)
def test_a_server_that_says_nothing_of_use_is_asked_twice(answer: Any) -> None:
    class Odd:
        def execute_command(self, _: str) -> Any:
            return answer

    assert not gives_all_streams(Odd())


def test_a_server_that_knows_no_hello_is_asked_twice() -> None:
    class Old:
        def execute_command(self, _: str) -> Any:
            raise redis.ResponseError("unknown command")

    assert not gives_all_streams(Old())
