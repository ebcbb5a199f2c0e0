"""`pydantic=True` of batch tasks, on a device: item by item what Celery does with an argument."""

from typing import Any

import pytest

from apps import typed
from apps.typed import Order, Terms
from batchery import InvalidItem, ItemFailed
from conftest import StartWorker
from support.harness import Worker
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    typed.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.typed", "-c", "1")


@pytest.mark.parametrize("task", [typed.price_one, typed.price], ids=["celery", "batch"])
def test_models_are_sent_and_returned_as_celery_does(worker: Worker, task: Any) -> None:
    assert task.delay(Order(count=2)).get(timeout=TIMEOUT_S) == {"cents": 200}
    assert task.delay({"count": "3"}).get(timeout=TIMEOUT_S) == {"cents": 300}
    terms = Terms(cents=7)
    sent = task.apply_async((Order(count=2),), {"terms": terms}, countdown=0)
    assert sent.get(timeout=TIMEOUT_S) == {"cents": 14}


def test_an_item_that_does_not_validate_fails_alone(worker: Worker) -> None:
    items = [{"count": number} for number in range(40)]
    items[3], items[20] = {"count": "many"}, {"count": 1, "name": "gold"}  # type: ignore[dict-item]
    jobs = typed.mates.submit_many(items).results
    answers = [job.get(timeout=TIMEOUT_S, propagate=False) for job in jobs]
    assert [type(each) for each in (answers[3], answers[20])] == [InvalidItem, InvalidItem]
    assert "apps.typed.mates: item.count: Input should be a valid integer" in str(answers[3])
    assert "item.name: Value error, gold is out of stock" in str(answers[20])
    good = [(job.id, each) for job, each in zip(jobs, answers, strict=True) if type(each) is dict]
    # Each has its own request, and the batch was not split for the two.
    assert [each["id"] for _, each in good] == [task_id for task_id, _ in good]
    assert len(good) == 38
    assert {each["mates"] for _, each in good} == {38}


def test_other_outcomes_are_left_as_they_are(worker: Worker) -> None:
    retried = typed.mates.delay(Order(count=1, name="retried"))
    assert retried.get(timeout=TIMEOUT_S)["retries"] == 1
    with pytest.raises(ItemFailed, match="no such tea"):
        typed.mates.delay(Order(count=1, name="failed")).get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("count", [2, 50])
def test_models_are_sent_by_submit_many(worker: Worker, count: int) -> None:
    results = typed.price.submit_many(
        [Order(count=number) for number in range(count)], {"terms": Terms(cents=3)}
    )
    assert results.get(timeout=TIMEOUT_S) == [{"cents": 3 * number} for number in range(count)]


def test_items_of_a_map_are_validated(worker: Worker) -> None:
    whole = typed.price.map([{"count": 1}, {"count": 2}]).delay()
    assert whole.get(timeout=TIMEOUT_S) == [{"cents": 100}, {"cents": 200}]
    with pytest.raises(InvalidItem, match=r"item\.count"):
        typed.price.map([{"count": 1}, {}]).delay().get(timeout=TIMEOUT_S)
