"""What a batch function sees of its jobs, and jobs that become others."""

from typing import Any

import pytest
from celery import chord, group

from apps import canvas
from batchery import BatchArgumentError, UnserialisableResult
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(scope="module")
def batching(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.canvas")


@pytest.fixture(scope="module")
def alone(start_module_worker: StartWorker) -> Worker:
    """The same tasks in a worker whose app has installed nothing: batches of one."""
    env = {"DEFAULT_QUEUE": "alone", "INSTALL": "0"}
    worker = start_module_worker("apps.canvas", "-P", "threads", "-c", "4", env=env)
    assert worker.devices() == []
    return worker


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    canvas.app.conf.update(broker_url=redis_url, result_backend=redis_url)


@pytest.fixture(params=["celery", "alone"])
def queue(request: pytest.FixtureRequest, batching: Worker) -> str:
    """The queue of a worker with a device, and of one without; what jobs become has the first."""
    if request.param == "alone":
        request.getfixturevalue("alone")
    return str(request.param)


def answer(job: Any) -> Any:
    return job.get(timeout=TIMEOUT_S)


# self.request


def test_a_function_sees_the_request_of_its_job(queue: str) -> None:
    sent: Any = {"queue": queue, "priority": 3, "headers": {"tenant": "a"}}
    job = canvas.look.apply_async(("x",), {"tag": "t"}, **sent)
    seen = answer(job)
    assert (seen["item"], seen["args"], seen["kwargs"]) == ("x", ["x"], {"tag": "t"})
    assert seen["id"] == seen["root_id"] == seen["correlation_id"] == job.id
    assert seen["headers"].pop("batchery_sent_at") > 0
    assert (seen["headers"], seen["parent_id"], seen["retries"]) == ({"tenant": "a"}, None, 0)
    assert (seen["routing_key"], seen["priority"]) == (queue, 3)


def test_jobs_that_share_a_batch_are_seen_side_by_side(batching: Worker) -> None:
    def together() -> list[tuple[str, Any]]:
        jobs = canvas.look.submit_many(map(str, range(20)))
        seen = [(job.id, answer(job)) for job in jobs]
        return seen if any(len(each["jobs"]) > 1 for _, each in seen) else []

    for number, (task_id, seen) in enumerate(wait_for(together, "a batch of several jobs")):
        assert (seen["item"], seen["id"]) == (str(number), task_id)
        assert task_id in {each for each, _ in seen["jobs"]}
        assert [items for _, items in seen["jobs"]] == [[at] for at in range(len(seen["jobs"]))]


def test_a_multi_item_job_is_one_job_of_many_items(queue: str) -> None:
    header = {"batchery": {"v": 1, "n": 3}}
    job = canvas.look.apply_async((["a", "bad", "c"],), headers=header, queue=queue)
    first, second, third = answer(job)
    assert first["ok"]["id"] == third["ok"]["id"] == job.id
    assert first["ok"]["headers"].items() >= header.items()
    assert second["error"]["type"] == "LookupError"
    # The batch was cut in halves, of which each was told what it has.
    assert first["ok"]["jobs"] == third["ok"]["jobs"] == [[job.id, [0]]]


def test_retries_are_counted_where_the_function_can_see_them(queue: str) -> None:
    assert answer(canvas.look.apply_async(("again",), queue=queue))["retries"] == 2


def test_a_function_sees_the_group_and_the_parent_of_its_job(queue: str) -> None:
    steps: Any = canvas.look.s("x") | group(canvas.look.s(), canvas.look.s())
    result = steps.apply_async(queue=queue)
    for seen in answer(result):
        assert seen["group"] == result.id
        # What the first step answered is the item of the others.
        assert seen["parent_id"] == seen["root_id"] == seen["item"]["id"]


def test_function_that_asks_a_batch_for_an_id_gets_that_of_each_job(queue: str) -> None:
    # It raises where there are several jobs, so that each runs alone, and is never given another's.
    jobs = [canvas.ask.apply_async(("id",), queue=queue) for _ in range(20)]
    assert [answer(job) for job in jobs] == [job.id for job in jobs]


def test_a_function_without_self_is_told_how_to_see_its_jobs(batching: Worker) -> None:
    with pytest.raises(AttributeError, match="bind=True"):
        answer(canvas.unbound.delay("x"))


def test_a_function_tells_the_state_of_each_of_its_jobs(queue: str) -> None:
    names = [f"{queue}-{number}" for number in range(3)]
    jobs = [canvas.progress.apply_async((name,), queue=queue) for name in names]
    with canvas.redis() as redis:
        for name, job in zip(names, jobs, strict=True):
            wait_for(lambda job=job: job.state == "PROGRESS", "the state")  # type: ignore[misc]
            assert job.info == {"item": name}
            redis.set(name, 1)
    assert [answer(job) for job in jobs] == names


def test_a_job_of_a_tracked_task_is_seen_as_started_while_it_runs(batching: Worker) -> None:
    (device,) = batching.devices()
    job = canvas.tracked.delay("tracked")
    with canvas.redis() as redis:
        wait_for(lambda: job.state == "STARTED", "the state")
        assert job.info == {"pid": device.pid, "hostname": batching.name}
        redis.set("tracked", 1)
    assert answer(job) == "tracked"
    assert job.state == "SUCCESS"


def test_a_device_is_told_to_prepare_itself_like_any_child_process(batching: Worker) -> None:
    (device,) = batching.devices()
    with canvas.redis() as redis:
        wait_for(
            lambda: redis.sismember(canvas.PREPARED, str(device.pid)), "it has prepared itself"
        )
        assert not redis.sismember(canvas.PREPARED, str(batching.pid))


# Celery's own calls inside the function


def test_celerys_own_calls_answer_for_one_item_of_a_batch(queue: str) -> None:
    wishes = ["a", "retry", "replace", "b"] * 3
    jobs = [canvas.stock_calls.apply_async((wish,), queue=queue) for wish in wishes]
    assert [answer(job) for job in jobs] == ["a 0", "retry 2", "REPLACED", "b 0"] * 3


def test_other_tasks_called_eagerly_answer_as_within_an_ordinary_task(batching: Worker) -> None:
    own_id, *stock = answer(canvas.calls_of_a_task.delay())
    answers = [42, "A", 42, 42, None, "eager"]
    assert stock == [*answers, own_id, own_id]
    # An unbound function sees no job that could be the parent; nor does one that has several.
    jobs = canvas.calls_of_unbound.submit_many(map(str, range(50)))
    seen = [answer(job) for job in jobs]
    assert {size for size, *_ in seen} != {1}
    assert all(others == [*answers, "eager", None] for _, *others in seen)
    alone = canvas.calls_of_bound.delay("a")
    assert answer(alone) == [[alone.id], *answers, alone.id, alone.id]
    for ids, *others in map(answer, canvas.calls_of_bound.submit_many(map(str, range(50)))):
        parents = [ids[0]] * 2 if len(ids) == 1 else ["eager", None]
        assert others == [*answers, *parents]


def test_retry_with_unsupported_options_is_refused_in_a_batch(batching: Worker) -> None:
    with pytest.raises(BatchArgumentError, match=r"Replace\("):
        answer(canvas.stock_calls.delay("too much"))


# Replace


@pytest.mark.parametrize(
    ("wish", "becomes"),
    [
        ("stay", 5),
        ("task", 6),
        ("ordinary", 10),
        ("chain", 13),
        ("group", [6, 10]),
        ("chord", 12),
        ("itself", 6),
    ],
)
def test_a_job_becomes_another_and_keeps_its_id(queue: str, wish: str, becomes: Any) -> None:
    job = canvas.become.apply_async((wish,), {"number": 5}, queue=queue)
    assert answer(job) == becomes


def test_a_job_that_became_another_fails_with_it(queue: str) -> None:
    with pytest.raises(LookupError, match="replaced"):
        answer(canvas.become.apply_async(("failure",), queue=queue))


def test_only_the_job_that_wishes_is_replaced(batching: Worker) -> None:
    wishes = ["task", "stay", "chain", "ordinary"] * 10
    jobs = canvas.become.submit_many(wishes, {"number": 2})
    assert [answer(job) for job in jobs] == [3, 2, 7, 4] * 10


@pytest.mark.parametrize("wish", ["task", "chain", "group"])
def test_a_replaced_job_keeps_its_place_in_a_chain(queue: str, wish: str) -> None:
    after = canvas.total.s() if wish == "group" else canvas.double.s()
    steps: Any = canvas.become.s(wish, number=1) | after
    assert answer(steps.apply_async(queue=queue)) == {"task": 4, "chain": 10, "group": 4}[wish]


def test_a_replaced_job_keeps_its_place_in_a_chord(queue: str) -> None:
    header = [canvas.become.s(wish, number=3) for wish in ("task", "stay", "chain", "ordinary")]
    for each in header:
        each.set(queue=queue)
    assert answer(chord(header)(canvas.total.s().set(queue=queue))) == 4 + 3 + 9 + 6


def test_a_replaced_job_keeps_its_callbacks(queue: str) -> None:
    link = canvas.callback.s().set(queue=queue)
    number = 40 + len(queue)
    job = canvas.become.apply_async(("chain",), {"number": number}, link=link, queue=queue)
    assert answer(job) == 2 * number + 3
    failing = canvas.become.apply_async(("failure",), link_error=link, queue=queue)
    with canvas.redis() as redis:
        wanted = [f"callback {each}" for each in (2 * number + 3, failing.id)]

        def called() -> bool:
            seen = [item for item, _ in canvas.executions(redis)]
            return [seen.count(each) for each in wanted] == [1, 1]

        wait_for(called, "both callbacks, once each")


def test_invalid_replacement_fails_its_job_alone(batching: Worker) -> None:
    with pytest.raises(TypeError, match="no signature"):
        answer(canvas.become.delay("nothing"))
    with pytest.raises(UnserialisableResult, match="JSON cannot write it"):
        answer(canvas.become.delay("unsendable"))
    header = {"batchery": {"v": 1, "n": 2}}
    one, two = answer(canvas.become.apply_async((["stay", "task"],), headers=header))
    assert one == {"ok": 1}
    assert "cannot be replaced" in two["error"]["message"]
