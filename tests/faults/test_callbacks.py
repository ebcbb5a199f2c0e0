"""What follows a job is sent once: though its worker is killed, or Redis is away meanwhile."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord

from apps import callbacks
from conftest import StartWorker
from support.harness import open_redis, queue_length, unsettled, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S


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


def stored(url: str, task_id: str) -> Any:
    """What is stored of a job; None if nothing is."""
    with open_redis(url) as redis:
        found: Any = redis.get(f"celery-task-meta-{task_id}")
    return json.loads(found) if found else None


def retried(gate: str, book: str) -> None:
    callbacks.retried.apply_async(("item",), {"gate": gate, "book": book})


@pytest.mark.parametrize(
    ("send", "noted"), [(chained, "item"), (linked, "item"), (retried, "retried")]
)
def test_callbacks_of_a_job_that_runs_twice_are_sent_once(
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
    with open_redis(redis_url) as redis:
        wait_for(lambda: not redis.keys("batchery:sent:*"), "no dedupe key is left")


def test_chord_body_is_sent_although_the_worker_of_its_last_part_dies(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    """Celery's claim to send it stands for some twenty seconds, longer than recovery takes."""
    gate, hold, book = tmp_path / "gate", tmp_path / "hold", tmp_path / "book"
    gate.touch()
    first = start_worker("apps.callbacks")
    header = [callbacks.gated.s(name, gate=str(gate)) for name in ("a", "b")]
    chord(header)(callbacks.note.s(book=str(book), hold=str(hold)))
    wait_for(Path(f"{hold}.passed").exists, "the body is about to be sent")
    first.process.kill()
    first.wait_exit()
    hold.touch()
    start_worker("apps.callbacks")
    wait_for(book.exists, "the body has run", TIMEOUT_S)
    wait_for(lambda: unsettled(redis_url) == 0 and not queue_length(redis_url), "all is done")
    assert book.read_text().splitlines() in ([str(["a", "b"])], [str(["b", "a"])])


def test_callback_waits_until_redis_is_back(
    start_worker: StartWorker, tmp_path: Path, own_redis: OwnRedis
) -> None:
    """Celery gives up after half a second, and says that a job failed that has succeeded."""
    gate, hold, book = tmp_path / "gate", tmp_path / "hold", tmp_path / "book"
    gate.touch()
    env = {"CELERY_BROKER_URL": own_redis.url, "CELERY_RESULT_BACKEND": own_redis.url}
    worker = start_worker("apps.callbacks", env=env)
    # Celery tries once, and its client for some seconds.
    note = callbacks.note.s(book=str(book), hold=str(hold)).set(retry=False)
    with Celery("sender", broker=own_redis.url, backend=own_redis.url, set_as_current=False) as app:
        keywords = {"gate": str(gate)}
        sent = app.send_task(callbacks.gated.name, ["item"], keywords, link=note).id
    wait_for(Path(f"{hold}.passed").exists, "the callback is about to be sent")
    own_redis.kill()
    hold.touch()
    wait_for(lambda: "a job's completion waits" in worker.log, "Celery has given up")
    own_redis.start()
    wait_for(book.exists, "the callback has run", TIMEOUT_S)
    wait_for(lambda: stored(own_redis.url, sent), "the result is stored")
    assert stored(own_redis.url, sent)["status"] == "SUCCESS"
    wait_for(
        lambda: unsettled(own_redis.url) == 0 and not queue_length(own_redis.url), "all is done"
    )
    assert book.read_text().split() == ["item"]
