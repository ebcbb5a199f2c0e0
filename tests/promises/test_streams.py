"""Partial results, from functions and step models in real workers to readers of every kind."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from redis import Redis

from batchery import (
    AsyncClient,
    BatchArgumentError,
    BatchTask,
    Client,
    ItemFailed,
    NoResult,
    Partial,
    SettingsError,
    UnknownJob,
    UnserialisableResult,
    install,
)
from batchery.protocol.headers import STREAMED
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, client: Celery) -> Worker:
    return start_module_worker("apps.streaming", "-c", "1").wait_answers(client)


@pytest.fixture
def caller(redis_url: str, worker: Worker) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


def task(client: Any, name: str, **options: Any) -> Any:
    return client.task(f"apps.streaming.{name}", queue="celery", **options)


def stream(client: Any, name: str, item: Any, **keywords: Any) -> Any:
    return task(client, name).stream(item, timeout_s=TIMEOUT_S, **keywords)


def in_slots(worker: Worker, client: Celery) -> int:
    stats = worker.inspect(client, "stats")
    return int(stats["pool"]["devices"]["cpu/speller"]["batches_in_flight"])


def stored(store: Any, task_id: str) -> bool:
    return bool(store.exists(f"celery-task-meta-{task_id}"))


def test_pieces_come_before_the_job_ends_each_once_and_in_order(
    caller: Client, store: Any, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    pieces = stream(caller, "gated", str(gate))
    assert [next(pieces) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert pieces.last_id == "5-0"
    assert not stored(store, pieces.id)
    with pytest.raises(NoResult, match="not read to the end"):
        _ = pieces.result
    gate.touch()
    assert list(pieces) == [5, 6, 7, 8, 9]
    assert isinstance(pieces.result, int)
    assert list(pieces) == []


def test_a_reader_learns_of_the_end_at_once_whatever_has_stored_the_result(
    caller: Client, store: Any
) -> None:
    """Looking for results would take half a second."""
    failed = stream(caller, "spell", "no!")
    assert [next(failed) for _ in "no!"] == ["n", "o", "!"]
    with pytest.raises(ItemFailed, match="shouted"):
        next(failed)
    with pytest.raises(ItemFailed, match="shouted"):
        _ = failed.result
    retried = stream(caller, "silent", 1)
    assert (list(retried), retried.result) == ([], 1)
    forgotten = stream(caller, "forgetful", "gone")
    assert (list(forgotten), forgotten.result) == (["gone"], None)
    assert not stored(store, forgotten.id)
    for each in (failed, retried, forgotten):
        ends = [entry for _, entry in store.xrange(f"batchery-pieces:{each.id}") if b"end" in entry]
        assert len(ends) == 1


def test_items_that_raise_are_found_and_their_mates_repeat_nothing(
    redis_url: str, worker: Worker
) -> None:
    """The batch runs again in halves, and again; each piece has been sent once."""

    async def scene() -> None:
        async with AsyncClient(redis_url) as client:
            explosive = task(client, "explosive")
            words = ["apple", "pear!", "plum", "fig", "bad!ly", "quince", "date", "lime"]
            streams = [explosive.stream(word, timeout_s=TIMEOUT_S) for word in words]
            for word, each in zip(words, streams, strict=True):
                clean, bang, _ = word.partition("!")
                assert "".join([await anext(each) for _ in clean]) == clean
                if bang:
                    with pytest.raises(ValueError, match=word):
                        await anext(each)
                else:
                    assert await anext(each, None) is None
                    assert each.result == word.upper()

    asyncio.run(scene())


def test_a_retry_goes_on_in_the_stream_without_repeating(caller: Client, tmp_path: Path) -> None:
    path = str(tmp_path / "there")
    pieces = stream(caller, "second_time", path)
    assert (list(pieces), pieces.result) == ([1, 2, 3], len(path))


def test_partials_that_mean_nothing_fail_their_job_in_one_line(caller: Client) -> None:
    with pytest.raises(BatchArgumentError, match="index 1, and was given 1 item"):
        list(stream(caller, "wrong", "index"))
    with pytest.raises(UnserialisableResult, match="JSON cannot write"):
        list(stream(caller, "wrong", "object"))


def test_plain_callers_get_the_whole_result_and_redis_no_piece(
    client: Celery, worker: Worker, store: Any
) -> None:
    before = set(store.keys("batchery-pieces:*"))
    plain = [client.send_task("apps.streaming.spell", (word,)) for word in ("one", "two")]
    assert [each.get(timeout=TIMEOUT_S) for each in plain] == ["ONE", "TWO"]
    # As the next step of a chain, which inherits headers.
    inherited = client.send_task("apps.streaming.spell", ("three",), headers=STREAMED)
    assert inherited.get(timeout=TIMEOUT_S) == "THREE"
    assert set(store.keys("batchery-pieces:*")) <= before


def test_cached_results_and_ordinary_tasks_have_no_pieces(caller: Client) -> None:
    for name in ("cached", "cached", "shout"):
        pieces = stream(caller, name, "word")
        assert (list(pieces), pieces.result) == ([], "WORD")


def test_step_models_stream_from_many_slots_at_once(redis_url: str, worker: Worker) -> None:
    """200 readers of one client, on one connection that reads and one that writes."""
    app = Celery("readers", broker=redis_url, backend=redis_url, set_as_current=False)
    app.conf.redis_client_name = "readers"

    def connections() -> int:
        with open_redis(redis_url) as redis:
            return sum(each["name"] == "readers" for each in redis.client_list())

    async def scene() -> int:
        async with AsyncClient(app) as client:
            speller = client.task("speller")
            texts = [f"text {number} " * 3 for number in range(200)]

            async def read(text: str) -> bool:
                pieces = speller.stream(text, timeout_s=TIMEOUT_S)
                heard = "".join([piece async for piece in pieces])
                return bool(heard == text == pieces.result["text"])

            readers = [asyncio.create_task(read(text)) for text in texts]
            await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
            held = await asyncio.to_thread(connections)
            assert all(await asyncio.gather(*readers))
        return held

    assert asyncio.run(scene()) <= 4
    wait_for(lambda: not connections(), "all connections are closed")
    app.close()


def test_a_reader_that_comes_back_misses_nothing(
    redis_url: str, caller: Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = caller.task("speller").stream("abcdefgh", timeout_s=TIMEOUT_S, gate=str(gate))
    assert [next(first) for _ in range(3)] == ["a", "b", "c"]
    task_id, last_id = first.id, first.last_id
    first.leave()
    assert list(first) == []
    del first
    with Client(redis_url) as other:
        second = other.follow(task_id, last_id, timeout_s=TIMEOUT_S)
        assert next(second) == "d"
        # Beside one that reads the end already.
        beside = other.follow(task_id, timeout_s=TIMEOUT_S)
        gate.touch()
        assert (list(second), second.result["text"]) == (list("efgh"), "abcdefgh")
        assert "".join(beside) == "abcdefgh"
        whole = other.follow(task_id, timeout_s=TIMEOUT_S)
        assert "".join(whole) == "abcdefgh"
        with pytest.raises(BatchArgumentError, match="expected the id of a piece"):
            other.follow(task_id, "yesterday")


def test_closing_a_stream_frees_its_slot_and_a_queued_job_is_not_begun(
    client: Celery, caller: Client, worker: Worker, tmp_path: Path
) -> None:
    gate = str(tmp_path / "never")
    with caller.task("speller").stream("ab", timeout_s=TIMEOUT_S, gate=gate) as pieces:
        assert next(pieces) == "a"
    with pytest.raises(TaskRevokedError):
        client.AsyncResult(pieces.id).get(timeout=TIMEOUT_S)
    wait_for(lambda: in_slots(worker, client) == 0, "its slot is free")
    nobody = caller.task("nobody").stream(1)
    nobody.close()
    wait_for(lambda: nobody.id in worker.inspect(client, "revoked"), "it is revoked")


def test_a_reader_that_vanishes_has_its_job_cancelled_and_a_plain_job_goes_on(
    client: Celery, caller: Client, worker: Worker, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    plain = client.send_task("speller", ("ab",), {"gate": str(gate)}, queue="speller")
    followed = caller.task("speller").stream("ab", timeout_s=TIMEOUT_S, gate=str(gate))
    gone = caller.task("speller").stream("ab", timeout_s=TIMEOUT_S, gate=str(gate))
    assert (next(followed), next(gone)) == ("a", "a")
    gone_id = gone.id
    began_s = time.monotonic()
    del gone
    with pytest.raises(TaskRevokedError):
        client.AsyncResult(gone_id).get(timeout=TIMEOUT_S)
    # Its reader was there within the last two seconds before it went.
    assert time.monotonic() - began_s > 5 - 2 - 1
    assert not plain.ready()
    gate.touch()
    assert (list(followed), plain.get(timeout=TIMEOUT_S)["text"]) == (["b"], "ab")


def test_a_caller_for_whom_nothing_comes_is_told_why(caller: Client, worker: Worker) -> None:
    nothing = caller.task("unserved").stream(1, timeout_s=0.2)
    with pytest.raises(NoResult, match=r"nothing within 0.2 s: 1 waiting in queue 'unserved'"):
        next(nothing)


def test_a_job_that_nothing_is_known_of_cannot_be_followed(
    redis_url: str, caller: Client, client: Celery, worker: Worker, tmp_path: Path
) -> None:
    text = "job no-such-job: there is no stream of it, and no result"
    for after in (None, "3-0"):
        with pytest.raises(UnknownJob, match=text):
            next(caller.follow("no-such-job", after))

    async def scene() -> None:
        async with AsyncClient(redis_url) as other:
            with pytest.raises(UnknownJob, match=text):
                await anext(other.follow("no-such-job"))

    asyncio.run(scene())
    # One that waits in the queue is known, and so is one that has only a result.
    waiting = caller.task("nobody").stream(1)
    with pytest.raises(NoResult, match="batchery stats") as caught:
        next(caller.follow(waiting.id, timeout_s=0.3))
    assert not isinstance(caught.value, UnknownJob)
    waiting.close()
    plain = client.send_task("speller", ("ab",), queue="speller")
    assert plain.get(timeout=TIMEOUT_S)["text"] == "ab"
    followed = caller.follow(plain.id, timeout_s=TIMEOUT_S)
    assert (list(followed), followed.result["text"]) == ([], "ab")


def test_streams_are_bounded_and_expire(caller: Client, store: Any, tmp_path: Path) -> None:
    few = stream(caller, "gated", str(tmp_path / "gate"))
    key = f"batchery-pieces:{few.id}"
    assert 80_000 < store.ttl(key) <= 86_400
    (tmp_path / "gate").touch()
    assert list(few) == list(range(10))
    wait_for(lambda: 0 < store.ttl(key) <= 3600, "it expires within an hour")
    many = stream(caller, "flood", 20_000)
    with contextlib.suppress(NoResult):  # Whoever reads too slowly learns of it.
        assert list(many) == list(range(20_000))
    assert caller.follow(many.id, "19999-0", timeout_s=TIMEOUT_S).fetched == (19999, 0)
    late = caller.follow(many.id, timeout_s=TIMEOUT_S)
    with pytest.raises(NoResult, match="were dropped before they were read"):
        list(late)
    wait_for(lambda: stored(store, many.id), "the job has ended")
    assert store.xlen(f"batchery-pieces:{many.id}") < 1200


def test_results_on_another_server_stream_as_well(
    start_module_worker: StartWorker, redis_url: str, own_redis: OwnRedis, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    apart = start_module_worker(
        "apps.streaming", "-c", "1", env={"CELERY_BROKER_URL": own_redis.url}
    )
    app = Celery("apart", broker=own_redis.url, backend=redis_url, set_as_current=False)
    with contextlib.closing(app), Client(app) as caller:
        pieces = stream(caller, "gated", str(gate))
        assert [next(pieces) for _ in range(5)] == list(range(5))
        gate.touch()
        assert list(pieces) == list(range(5, 10))
        with contextlib.closing(Redis.from_url(own_redis.url)) as broker:
            assert not broker.exists(f"batchery-pieces:{pieces.id}")
    apart.kill()


def test_eager_tasks_and_their_own_method_stream() -> None:
    app = install(
        Celery("eager", broker="memory://", backend="cache+memory://", set_as_current=False)
    )
    app.conf.task_always_eager = True

    @app.task(shared=False, base=BatchTask)
    def spell(words: list[str]) -> Any:
        for index, word in enumerate(words):
            yield Partial(index, word)
        return [word.upper() for word in words]

    spell_task: Any = spell
    assert spell_task("direct") == "DIRECT"
    pieces = spell_task.stream("hello")
    assert (list(pieces), pieces.result) == ([], "HELLO")
    app.conf.task_always_eager = False
    with pytest.raises(SettingsError, match="set result_backend to a Redis URL"):
        spell_task.stream("hello")
