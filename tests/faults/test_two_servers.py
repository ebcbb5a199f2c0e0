"""Results on another Redis server than the queue: whatever breaks, each job has one result."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil
import pytest
from celery import Celery
from redis import Redis

from batchery import Client
from support.harness import Worker, queue_length, unsettled, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S, patient

#: As the setting `max_pass_s` in some tests, and a hard time limit.
LIMIT_S = int(patient(2))


TASK = "apps.torn.name_anew"


class Place(NamedTuple):
    """Two servers, and how to start a worker that uses both."""

    broker: OwnRedis
    results: OwnRedis
    plan: Path
    start: Callable[..., Worker]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    plan = folder / "plan"
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(OwnRedis(folder / "broker"))
        results = stack.enter_context(OwnRedis(folder / "results"))

        def start(*arguments: str, app: str = "apps.torn", **more: str) -> Worker:
            env = {"CELERY_RESULT_BACKEND": results.url, "TORN_PLAN": str(plan), **more}
            worker = Worker(folder, broker.url, app, *arguments, env=env)
            stack.callback(worker.kill)
            return worker.wait_ready()

        yield Place(broker, results, plan, start)


@pytest.fixture(scope="module")
def worker(place: Place) -> Worker:
    return place.start()


class Sent:
    """Jobs that are held until they are let go, and what is announced of them."""

    def __init__(self, place: Place, queue: str = TASK, *, is_held: bool = True) -> None:
        """Sends them; unless `is_held`, the test does so when nothing is to hold them."""
        self._place = place
        self._queue = queue
        self._gate = place.plan.with_suffix(".hold")
        self._told: Counter[str] = Counter()
        self._redis: Any = Redis.from_url(place.results.url)
        self._channel = self._redis.pubsub()  # type: ignore[no-untyped-call]
        self._channel.psubscribe("celery-task-meta-*")
        assert self._channel.get_message(timeout=TIMEOUT_S)["type"] == "psubscribe"
        if is_held:
            self._gate.touch()
            self.send()

    def send(self) -> None:
        with Celery("sender", broker=self._place.broker.url, set_as_current=False) as app:
            self.ids = [app.send_task(TASK, [n], queue=self._queue).id for n in range(200)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.unlink(missing_ok=True)
        self._channel.close()
        self._redis.close()

    def stored(self) -> list[Any]:
        found: Any = self._redis.mget([f"celery-task-meta-{each}" for each in self.ids])
        return [json.loads(each) for each in found if each]

    def let_go(self) -> None:
        self._gate.unlink()

    def has_one_result_each(self, *, is_told: bool = True) -> None:
        """Waits for all results; `is_told` if each was announced to this process, once."""
        wait_for(lambda: len(self.stored()) == len(self.ids), "all jobs are answered", TIMEOUT_S)
        wait_for(lambda: unsettled(self._place.broker.url) == 0, "no lease is left", TIMEOUT_S)
        stored = {each["task_id"]: each["result"] for each in self.stored()}
        assert [stored[each].split()[0] for each in self.ids] == [str(n) for n in range(200)]

        def are_told() -> bool:
            while message := self._channel.get_message(timeout=0.5):
                told = json.loads(message["data"])
                self._told[told["task_id"]] += 1
                assert told["result"] == stored[told["task_id"]]
            return set(self._told) == set(self.ids)

        if is_told:
            wait_for(are_told, "all are told", TIMEOUT_S)
            assert set(self._told.values()) == {1}


def test_a_worker_killed_between_result_and_acknowledgement(place: Place, worker: Worker) -> None:
    place.plan.write_text("the worker is killed")
    killed = place.start("-Q", f"{TASK},first")
    with Sent(place, "first") as sent:
        sent.let_go()
        killed.wait_exit()
        assert 0 < len(sent.stored()) < len(sent.ids)
        # Theirs, unless the other worker has given them back by now.
        url = place.broker.url
        wait_for(lambda: unsettled(url) + queue_length(url, "first"), "some jobs are left")
        with Celery("control", broker=place.broker.url, set_as_current=False) as app:
            # It hears nothing while it connects anew after another test.
            asked: Any = {"destination": [worker.name], "reply": True, "timeout": 5, "limit": 1}
            wait_for(lambda: app.control.add_consumer("first", **asked), "it takes them", TIMEOUT_S)
        sent.has_one_result_each()


def test_connections_to_the_broker_killed_between_result_and_acknowledgement(
    place: Place, worker: Worker
) -> None:
    place.plan.write_text("all connections to the broker are killed")
    with Sent(place) as sent:
        sent.let_go()
        sent.has_one_result_each()
    assert not place.plan.exists()


@pytest.mark.parametrize("away", ["broker", "results"])
def test_a_server_is_away_for_a_while(place: Place, worker: Worker, away: str) -> None:
    server: OwnRedis = getattr(place, away)
    waits = worker.log.count("results wait for Redis")
    with Sent(place) as sent:
        server.kill()
        sent.let_go()
        wait_for(lambda: worker.has_logged("results wait for Redis", waits + 1), "results wait")
        server.start()
        # Redis does not keep subscriptions.
        sent.has_one_result_each(is_told=away == "broker")


def test_a_server_of_results_that_hangs_is_no_device_that_hangs(place: Place) -> None:
    worker = place.start("-Q", f"{TASK},silent", BATCHERY_MAX_PASS_S=str(LIMIT_S))
    pids = [each.pid for each in worker.devices()]
    # Nothing holds them, as that would be time of the device, too.
    with Sent(place, "silent", is_held=False) as sent:
        with place.results.hanging():
            sent.send()
            time.sleep(3 * LIMIT_S)
        sent.has_one_result_each()
    assert [each.pid for each in worker.devices()] == pids
    worker.kill()


def hangs(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture(scope="module")
def limited(place: Place) -> Worker:
    """A worker of streams, with a function that has a hard limit."""
    limits = {"STREAMING_LIMIT_S": str(LIMIT_S), "BATCHERY_MAX_PASS_S": str(LIMIT_S)}
    return place.start(
        "-Q", "apps.streaming.limited,limited,speller", app="apps.streaming", **limits
    )


@pytest.mark.parametrize("name", ["limited", "speller"])
def test_time_that_results_wait_for_a_server_that_hangs_is_no_time_of_a_stream(
    place: Place, limited: Worker, name: str, tmp_path: Path
) -> None:
    """Its function, or the steps of its model, have ended in time."""
    pids = [each.pid for each in limited.devices()]
    gate = tmp_path / "gate"
    app = Celery("sender", broker=place.broker.url, backend=place.results.url, set_as_current=False)
    with app, Client(app) as caller:
        task = "apps.streaming.limited" if name == "limited" else name
        # To wait for a gate would be time of the function.
        how: Any = {"hangs": place.results.pid} if name == "limited" else {"gate": str(gate)}
        pieces = caller.task(task, queue=name).stream("word", timeout_s=TIMEOUT_S, **how)
        if name == "limited":
            wait_for(lambda: hangs(place.results.pid), "it has Redis hang")
        with place.results.hanging():
            gate.touch()
            time.sleep(3 * LIMIT_S)
        assert "".join(pieces) == "word"
        assert pieces.result
    assert [each.pid for each in limited.devices()] == pids


def test_time_in_which_the_state_started_is_stored_is_no_time_of_a_batch(
    place: Place, limited: Worker
) -> None:
    pids = [each.pid for each in limited.devices()]
    with Celery("sender", broker=place.broker.url, set_as_current=False) as app:
        with place.results.hanging():
            job = app.send_task("apps.streaming.limited", ["word"], queue="limited")
            time.sleep(3 * LIMIT_S)
        with Redis.from_url(place.results.url) as results:
            key = f"celery-task-meta-{job.id}"
            wait_for(lambda: "SUCCESS" in str(results.get(key)), "its result", TIMEOUT_S)
    assert [each.pid for each in limited.devices()] == pids
