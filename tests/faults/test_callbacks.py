"""A worker is killed after a job has sent what follows it, and before it is acknowledged.

The job runs again, and what follows it does not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from apps import callbacks
from conftest import StartWorker
from harness import queue_length, unsettled, wait_for

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> Iterator[None]:
    callbacks.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    yield
    callbacks.app.close()


def chained(gate: str, book: str) -> None:
    (callbacks.gated.s("item", gate=gate) | callbacks.note.s(book=book)).delay()


def linked(gate: str, book: str) -> None:
    note = callbacks.note.s(book=book)
    callbacks.gated.apply_async(("item",), {"gate": gate}, link=note)


def retried(gate: str, book: str) -> None:
    callbacks.retried.apply_async(("item",), {"gate": gate, "book": book})


@pytest.mark.parametrize(
    ("send", "noted"), [(chained, "item"), (linked, "item"), (retried, "retried")]
)
def test_what_follows_a_job_is_sent_once(
    start_worker: StartWorker,
    redis_url: str,
    tmp_path: Path,
    send: Callable[[str, str], None],
    noted: str,
) -> None:
    gate, book = tmp_path / "gate", tmp_path / "book"
    passed = Path(f"{gate}.passed")
    first = start_worker("apps.callbacks")
    send(str(gate), str(book))
    wait_for(passed.exists, "the job is completed, and not acknowledged")
    wait_for(lambda: book.exists() and unsettled(redis_url) == 1, "what follows it is done")
    first.process.kill()
    first.wait_exit()
    start_worker("apps.callbacks")
    wait_for(lambda: passed.read_text().count("begun") == 2, "the job runs again", TIMEOUT_S)
    gate.touch()
    wait_for(lambda: unsettled(redis_url) == 0 and not queue_length(redis_url), "all is done")
    assert book.read_text().split() == [noted]
    with Redis.from_url(redis_url) as redis:
        wait_for(lambda: not redis.keys("batchery:sent:*"), "no mark is left")
