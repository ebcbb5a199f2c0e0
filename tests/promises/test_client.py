"""The client: data sets through a task, in one process and with one loop."""

import itertools
import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from batchery import ItemFailed, NoResult
from batchery_producer import Client, Outcome
from support.harness import Worker, wait_for
from support.patience import patient

APP = "apps.shop"
QUEUE = "celery"


@pytest.fixture
def shop(redis_url: str, worker: Worker) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


def traces(store: Any) -> set[bytes]:
    """What a client could have left behind, besides results that come after its end."""
    patterns = ("batchery:reply:*", "batchery:publisher:*", "nobody*")
    return {key for pattern in patterns for key in store.scan_iter(pattern)}


def test_one_job_is_celerys_own(shop: Client) -> None:
    shout = shop.task(f"{APP}.shout", queue=QUEUE)
    assert shout.delay("hello").get(timeout=patient(30)) == "HELLO"


def test_results_come_in_the_order_of_the_items(
    shop: Client, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = traces(store)
    numbers = itertools.count()
    new_ids = lambda count: [f"mine-{next(numbers)}" for _ in range(count)]  # noqa: E731
    monkeypatch.setattr("batchery_producer.stream.uuids", new_ids)
    shout = shop.task(f"{APP}.shout", queue=QUEUE)
    items = (f"text {number}" for number in range(1500))
    found = list(shout.map(items, window=200, timeout_s=patient(60)))
    assert found == [f"TEXT {number}" for number in range(1500)]
    assert traces(store) == before
    assert next(numbers) == 1500
    assert not list(store.scan_iter("celery-task-meta-mine-*"))


@pytest.mark.parametrize("per_job", [1, 7, 64])
def test_multi_item_jobs_answer_item_by_item(shop: Client, per_job: int) -> None:
    shout = shop.task(f"{APP}.shout", queue=QUEUE)
    found = list(
        shout.map([f"text {n}" for n in range(300)], per_job=per_job, timeout_s=patient(60))
    )
    assert found == [f"TEXT {number}" for number in range(300)]


def test_batches_are_formed_of_items_whatever_messages_they_came_in(shop: Client) -> None:
    read_batch = shop.task(f"{APP}.read_batch", queue=QUEUE)
    found = list(read_batch.map(list(range(300)), per_job=50, timeout_s=patient(60)))
    assert [each["item"] for each in found] == list(range(300))
    assert max(len(each["mates"]) for each in found) <= 64


@pytest.mark.parametrize("per_job", [None, 3], ids=["single", "multi-item"])
def test_one_bad_item_fails_alone(shop: Client, per_job: int | None) -> None:
    moody = shop.task(f"{APP}.moody", queue=QUEUE)
    items = [{"answer": "value", "value": number} for number in range(5)]
    items[1] = {"answer": "failed-exception", "why": "lost"}
    items[3] = {"answer": "failed", "why": "no good"}
    outcomes = list(moody.as_completed(items, per_job=per_job, ordered=True, timeout_s=patient(60)))
    assert [each.index for each in outcomes] == [0, 1, 2, 3, 4]
    assert [each.value for each in outcomes] == [0, None, 2, None, 4]
    assert repr(outcomes[1].error) == "LookupError('lost')"
    assert repr(outcomes[3].error) == "ItemFailed('no good')"
    assert outcomes[0] == Outcome(0, 0)


def test_map_raises_what_the_worker_raised(shop: Client) -> None:
    moody = shop.task(f"{APP}.moody", queue=QUEUE)
    items = [{"answer": "value", "value": 1}, {"answer": "failed", "why": "no good"}]
    results = moody.map(items, timeout_s=patient(60))
    assert next(results) == 1
    with pytest.raises(ItemFailed, match="no good"):
        next(results)


def test_keywords_reach_the_function(shop: Client) -> None:
    read_batch = shop.task(f"{APP}.read_batch", queue=QUEUE)
    options: Any = {"keywords": {"tag": "x"}, "timeout_s": patient(60)}
    found = list(read_batch.as_completed(range(100), **options))
    assert {each.value["tag"] for each in found} == {"x"}
    assert sorted(each.index for each in found) == list(range(100))


def test_items_are_read_as_there_is_room_for_them(shop: Client) -> None:
    read: list[int] = []

    def items() -> Iterator[str]:
        for number in range(1000):
            read.append(number)
            yield "text"

    results = shop.task(f"{APP}.shout", queue=QUEUE).map(items(), window=10, timeout_s=patient(60))
    for taken in range(1, 51):
        next(results)
        assert len(read) <= taken + 10
    results.close()


def test_outcomes_of_a_slow_input_come_while_it_is_read(shop: Client) -> None:
    read: list[int] = []
    count = round(patient(300))

    def items() -> Iterator[str]:
        for number in range(count):
            read.append(number)
            time.sleep(0.1)
            yield "text"

    with closing(shop.task(f"{APP}.shout", queue=QUEUE).as_completed(items())) as outcomes:
        assert next(outcomes).value == "TEXT"
    assert len(read) < count


@pytest.mark.parametrize("per_job", [None, 8])
def test_items_before_an_error_of_the_input_have_their_results(
    shop: Client, per_job: int | None
) -> None:
    def read() -> Iterator[str]:
        yield from (f"text {number}" for number in range(20))
        raise OSError("the input is gone")

    results = shop.task(f"{APP}.shout", queue=QUEUE).map(
        read(), per_job=per_job, timeout_s=patient(60)
    )
    assert list(itertools.islice(results, 20)) == [f"TEXT {number}" for number in range(20)]
    with pytest.raises(OSError, match="the input is gone"):
        next(results)


def test_a_stream_that_is_closed_revokes_what_was_not_begun(
    shop: Client, worker: Worker, client: Celery, store: Any
) -> None:
    before = traces(store)
    results = shop.task(f"{APP}.shout", queue="nobody").as_completed(range(3), timeout_s=patient(1))
    with pytest.raises(NoResult, match="3 waiting in queue 'nobody'"):
        next(results)
    ids = [json.loads(raw)["headers"]["id"] for raw in store.lrange("nobody", 0, -1)]
    assert len(ids) == 3

    def revoked() -> set[str]:
        return set(worker.inspect(client, "revoked"))

    wait_for(lambda: set(ids) <= revoked(), "the worker has heard of it")
    store.delete("nobody")
    assert traces(store) == before


def test_a_stream_says_once_why_nothing_comes(
    shop: Client, store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("batchery_producer.stream.HINT_S", 0.1)
    monkeypatch.setattr("batchery_producer.diagnosis.ASK_S", patient(5))
    with pytest.raises(NoResult):
        next(shop.task(f"{APP}.shout", queue="nobody").map(["text"], timeout_s=10.0))
    store.delete("nobody")
    (said,) = [each.message for each in caplog.records if each.name == "batchery_producer.stream"]
    assert re.match(r"no result for \d+ s: 1 waiting in queue 'nobody'; .* another queue", said)


def test_a_closed_client_reads_no_stream(redis_url: str) -> None:
    with Client(redis_url) as client:
        client.follow("nobody's").leave()
    with pytest.raises(NoResult, match="closed"):
        client.task("nobody").stream("item")
    with pytest.raises(NoResult, match="closed"):
        client.follow("nobody's")


def test_an_empty_stream_ends_at_once(shop: Client) -> None:
    assert list(shop.task("nobody").map([])) == []
