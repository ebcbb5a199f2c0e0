"""`batchery stats`, `batchery explain`, `celery inspect batchery` and events, on real workers."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from apps import shop
from batchery.cli.explain import find
from batchery.transport.redis_schema import Keys, find_own
from conftest import StartWorker
from support.commands import run, start
from support.harness import Worker, device_busy, wait_for
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S
from support.redis_places import with_database


@pytest.fixture(scope="module")
def worker(
    redis_url: str,
    start_module_worker: StartWorker,
    model_toml: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Worker:
    """A worker with tasks of an app and a built-in model."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "batchery.toml").write_text(model_toml)
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_module_worker("apps.shop", cwd=folder).wait_answers(shop.app)
    return worker.wait_known(redis_url)


def explain(redis_url: str, task_id: str) -> tuple[int, dict[str, Any]]:
    code, out, err = run(redis_url, "batchery", "explain", task_id, "-A", "apps.shop", "--json")
    assert out, err
    return code, json.loads(out)


def test_stats_tell_what_workers_do(
    worker: Worker, redis_url: str, start_module_worker: StartWorker
) -> None:
    # It knows nothing of Batchery.
    stock = start_module_worker("apps.stock", "-Q", "elsewhere").wait_answers(shop.app)
    shop.shout.submit_many([f"text {n}" for n in range(100)]).get(timeout=TIMEOUT_S)

    code, out, err = run(redis_url, "batchery", "stats", "-A", "apps.shop", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["workers"].keys() == {worker.name}
    figures = report["workers"][worker.name]
    assert figures["devices"]["cpu"]["state"] == "ready"
    assert {"celery", "embed", shop.shout.name} <= {*figures["queues"]}
    assert not [each for each in figures["queues"] if find_own(each) != each]
    assert figures["batches"]["jobs"] >= 100
    shouted = figures["batches"]["tasks"][shop.shout.name]
    assert sum(shouted["batch_sizes"].values()) == shouted["batches"]
    assert {"celery", "embed"} <= report["queues"].keys() == report["oldest_s"].keys()
    assert figures["devices"]["cpu"]["done"]["items"] == figures["batches"]["items"]
    assert "pidbox command error" not in stock.log


class LateWorker:
    """A worker that lives, by what Redis knows, and answers when it is told to."""

    def __init__(self, url: str) -> None:
        self.may_answer = threading.Event()
        self._app = Celery(broker=url, set_as_current=False)
        with Redis.from_url(url) as client:
            client.zadd(Keys().workers, {"late": client.time()[0] * 1000})
            about = {"name": "late@here", "queues": ["celery"], "expiry_s": 3600}
            client.hset(Keys().worker_info, "late", json.dumps(about))
        self._connection = self._app.connection_for_read()
        channel, handlers = self._connection.channel(), {"batchery": self._answer}
        control: Any = self._app.control
        node = control.mailbox.Node("late@here", None, channel, handlers)
        self._consumer = node.listen(callback=node.handle_message)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _answer(self, _: Any, **__: Any) -> Any:
        assert self.may_answer.wait(TIMEOUT_S)
        return {"devices": {}, "batches": {}, "clock_s": 1.0}

    def _serve(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError):
                self._connection.drain_events(timeout=1)

    def close(self) -> None:
        self.may_answer.set()
        self._is_over.set()
        self._thread.join()
        self._connection.close()


def test_a_worker_that_lives_may_answer_late(own_redis: OwnRedis) -> None:
    with contextlib.closing(LateWorker(own_redis.url)) as late:
        command = ("batchery", "stats", "-A", "apps.shop")
        code, out, _ = run(own_redis.url, *command, "--timeout", "0.1")
        assert code == 1
        assert "late@here: lives, and has not answered within 0.1 s" in out
        assert "no worker answers" not in out
        with start(own_redis.url, *command, "--timeout", str(TIMEOUT_S)) as process:
            late.may_answer.set()
            out, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert "late@here" in out


def test_celery_inspect_batchery_needs_no_app_of_ours(worker: Worker, redis_url: str) -> None:
    options = ("-d", worker.name, "--timeout", str(TIMEOUT_S), "--json")
    _, out, err = run(redis_url, "celery", "-b", redis_url, "inspect", *options, "batchery")
    assert out, err
    figures = json.loads(out)[worker.name]
    assert {"devices", "waiting", "oldest_waiting_s", "batches", "queues"} <= figures.keys()


def test_worker_without_devices_says_why_it_has_no_figures(
    worker: Worker, redis_url: str, start_module_worker: StartWorker
) -> None:
    other = start_module_worker("apps.hybrid", "-c", "1", "-Q", "elsewhere")
    other.inspect(shop.app, "ping")
    answer: Any = shop.app.control.broadcast(
        "batchery", destination=[other.name], reply=True, timeout=TIMEOUT_S, limit=1
    )
    assert "no batch task is routed to this worker's queues" in answer[0][other.name]["error"]
    assert other.stop() == 0


def test_a_success_is_explained_by_its_batch(worker: Worker, redis_url: str) -> None:
    jobs = shop.shout.submit_many(["a", "b", "c"])
    jobs.get(timeout=TIMEOUT_S)
    task_id = (jobs.results or [])[1].id
    code, found = explain(redis_url, task_id)
    assert (code, found["state"]) == (0, "SUCCESS")
    assert found["batch"]["device"] == "cpu"
    assert f"id {found['batch']['id']}, size {found['batch']['size']}" in found["text"]
    code, out, _ = run(redis_url, "batchery", "explain", task_id, "-A", "apps.shop")
    assert (code, out) == (0, f"SUCCESS: {found['text']}\n")


def test_a_job_without_a_result_is_looked_for_in_the_workers(
    worker: Worker, redis_url: str, tmp_path: Path
) -> None:
    scheduled = shop.shout.apply_async(("later",), countdown=600)
    wait_for(lambda: worker.inspect(shop.app, "scheduled"), "the scheduled job")
    with device_busy(worker, shop.app, shop.until.name, tmp_path / "gate") as running:
        for job, state in ((running, "ACTIVE"), (scheduled, "SCHEDULED")):
            found = find(shop.app, job.id)
            assert (found.exit_code, found.state, found.worker) == (3, state, worker.name)
        # Nobody takes it while the device computes.
        waiting = shop.read_batch.delay(1)
        found = find(shop.app, waiting.id)
        assert (found.exit_code, found.state, found.worker) == (4, "UNKNOWN", None)
    waiting.get(timeout=TIMEOUT_S)


@pytest.mark.parametrize("command", [("stats",), ("explain", "some-id")])
def test_without_a_redis_there_is_one_line_and_exit_code_2(command: tuple[str, ...]) -> None:
    url = "redis://127.0.0.1:1/0"  # Nobody listens there.
    code, out, err = run("redis://nowhere.invalid:1/0", "batchery", *command, "--redis", url)
    assert (code, out) == (2, "")
    assert err.startswith(f"batchery: error: no Redis at {url}")
    assert len(err.splitlines()) == 1


def test_queues_of_an_app_are_shown_while_it_has_no_worker(
    redis_url: str, model_toml: str, tmp_path: Path
) -> None:
    (tmp_path / "batchery.toml").write_text(model_toml)
    url = with_database(redis_url, 8)
    with Celery(broker=url, set_as_current=False) as client:
        for _ in range(3):
            client.send_task("embed", ["a text"], queue="embed")
    code, out, _ = run(url, "batchery", "stats", "-A", "apps.shop", cwd=tmp_path)
    assert code == 1
    assert "no worker answers" in out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert {"embed 3 no worker serves it", "celery 0"} <= set(rows)
    url = with_database(redis_url, 9)
    # Its tasks are in a module that it includes.
    code, out, _ = run(url, "batchery", "stats", "-A", "apps.including")
    assert code == 1
    assert ["included", "0"] in [line.split() for line in out.splitlines()]
