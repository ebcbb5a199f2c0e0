"""`submit_many`: Celery's own results, in bulk."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TimeoutError as CeleryTimeout
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from apps import shop
from batchery import BatchTask, install
from batchery_producer import submit_many
from support.harness import Worker
from support.patience import patient

COUNT = 100


@pytest.fixture(scope="module")
def worker(start_module_worker: Callable[..., Worker], redis_url: str) -> Worker:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.shop")


@pytest.mark.parametrize("method", ["join", "get", "join_native"])
def test_results_are_joined_in_order_and_kept(worker: Worker, method: str) -> None:
    results: Any = shop.shout.submit_many([f"text {number}" for number in range(COUNT)])
    wanted = [f"TEXT {number}" for number in range(COUNT)]
    assert getattr(results, method)(timeout=patient(30)) == wanted
    assert getattr(results, method)(timeout=patient(30)) == wanted
    assert results.successful()
    last: AsyncResult[Any] = AsyncResult(results.results[-1].id, app=shop.app)
    assert last.get(timeout=patient(30)) == wanted[-1]


def test_nothing_is_subscribed_to_any_more_when_all_has_come(worker: Worker, store: Any) -> None:
    results: Any = shop.shout.submit_many(["text"] * COUNT)
    results.join(timeout=patient(30))
    consumer: Any = shop.app.backend
    channels = {f"celery-task-meta-{each.id}".encode() for each in results.results}
    assert not channels & set(store.pubsub_channels())
    assert not channels & consumer.result_consumer.subscribed_to


def test_the_first_failure_is_raised(worker: Worker) -> None:
    items: list[Any] = [{"answer": "value", "value": number} for number in range(COUNT)]
    items[3] = {"answer": "failed-exception", "why": "lost"}
    results = shop.moody.submit_many(items)
    with pytest.raises(LookupError, match="lost"):
        results.join(timeout=patient(30))
    values: Any = results.join(timeout=patient(30), propagate=False)
    assert values[:3] == [0, 1, 2]
    assert isinstance(values[3], LookupError)


def test_a_timeout_is_celerys(worker: Worker, store: Any) -> None:
    results = shop.shout.submit_many(["text"] * COUNT, queue="nobody")
    with pytest.raises(CeleryTimeout):
        results.join(timeout=0.2)
    store.delete("nobody")


def test_jobs_that_are_sent_one_by_one_are_joined_as_ever(worker: Worker) -> None:
    results: Any = shop.shout.submit_many(["a", "b"])
    assert results.join(timeout=patient(30)) == ["A", "B"]


def test_without_a_broker_it_is_celerys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_many, "SEND_AWAY_S", 0.2)
    url = "redis://127.0.0.1:1/0"
    app = install(Celery("nowhere", broker=url, backend=url, set_as_current=False))

    def same(items: list[int]) -> list[int]:
        return items

    task: Any = app.task(base=BatchTask, shared=False, name="same")(same)
    with pytest.raises(OperationalError, match=r"tried for 0\.2 s"):
        task.submit_many(range(COUNT))
    with pytest.raises(OperationalError, match="tried for 0 s"):
        task.submit_many(range(COUNT), retry=False)
