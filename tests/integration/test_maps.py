"""`map`, `starmap` and `chunks` of batch tasks: on a device, with the results of Celery's own."""

import json
from typing import Any

import pytest
from celery import chord, signature

from apps import mapped
from batchery import BatchArgumentError, InvalidItem, ItemFailed
from conftest import StartWorker
from support.harness import Worker
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    mapped.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.mapped", "-c", "1")


def result(call: Any) -> Any:
    """What a signature gives, or the type and text of what it raises."""
    try:
        return call.apply_async().get(timeout=TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - it is compared with another one
        return type(error), str(error)


@pytest.mark.parametrize(
    "items", [[], [3], list(range(200)), [1, "raise", "raise"]], ids=lambda items: str(items)[:20]
)
def test_results_are_those_of_an_ordinary_task(worker: Worker, items: list[Any]) -> None:
    tuples = [(item,) for item in items]
    for make in (
        lambda task: task.map(items),
        lambda task: task.starmap(tuples),
        lambda task: task.chunks(tuples, 3),
        lambda task: task.chunks(tuples, 3).group(),
        lambda task: task.map(items) | mapped.total.si([1, 2]),
        lambda task: signature(json.loads(json.dumps(task.map(items))), app=mapped.app),
    ):
        assert result(make(mapped.square_batch)) == result(make(mapped.square))


def test_a_map_is_a_step_of_a_chain_and_a_member_of_a_chord(worker: Worker) -> None:
    for task in (mapped.square, mapped.square_batch):
        assert result(task.map([1, 2, 3]) | mapped.total.s()) == 14
        header = [task.map([1, 2]), task.starmap([(3,)])]
        whole = chord(header, body=mapped.total.map([[1, 2], [3]]))
        assert whole.apply_async().get(timeout=TIMEOUT_S) == [3, 3]


def test_items_of_a_map_run_on_the_device_in_batches(worker: Worker) -> None:
    (device,) = worker.devices()
    answers = mapped.places.map(range(20)).apply_async().get(timeout=TIMEOUT_S)
    assert {each["pid"] for each in answers} == {device.pid}
    assert [each["size"] for each in answers] == [8] * 16 + [4] * 4
    (part,) = mapped.places.chunks([(1,), (2,)], 2).apply_async().get(timeout=TIMEOUT_S)
    assert [each["pid"] for each in part] == [device.pid] * 2


def test_maps_of_a_model_go_to_its_queue_and_its_device(worker: Worker) -> None:
    (device,) = worker.devices()
    app, model = mapped.app, mapped.doubler
    calls: list[Any] = [model.map([1, 2]), model.starmap([(1,), (2,)])]
    for call in calls:
        answers = call.apply_async().get(timeout=TIMEOUT_S)
        assert answers == [{"doubled": 2 * item, "pid": device.pid} for item in (1, 2)]
    whole = model.chunks([(1,), (2,)], 1).apply_async().get(timeout=TIMEOUT_S)
    assert whole == [[{"doubled": 2 * item, "pid": device.pid}] for item in (1, 2)]
    # Of a program without our code, in the default queue, for the ordinary pool.
    sent = app.send_task("celery.map", kwargs={"task": {"task": "doubler"}, "it": [4]})
    assert [each["doubled"] for each in sent.get(timeout=TIMEOUT_S)] == [8]


def test_what_a_batch_task_refuses_fails_the_map(worker: Worker) -> None:
    with pytest.raises(ItemFailed, match="refused"):
        mapped.places.map([1, "refused", 2]).apply_async().get(timeout=TIMEOUT_S)
    with pytest.raises(BatchArgumentError, match=r"exactly one positional argument.*got 2"):
        mapped.places.starmap([(1,), (1, 2)])


def test_a_map_of_too_many_items_says_what_to_use(worker: Worker) -> None:
    text = r"map, starmap .* one message, and 10,001 .* maximum of 10,000: use submit_many"
    for call in (mapped.places.map, mapped.places.starmap, mapped.doubler.map):
        with pytest.raises(InvalidItem, match=text):
            call([(1,)] * 10_001)
    with pytest.raises(InvalidItem, match=text):
        mapped.places.chunks([(1,)] * 10_001, 10_001).apply_async()
