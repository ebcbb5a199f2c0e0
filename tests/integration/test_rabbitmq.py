"""The same jobs on a RabbitMQ, where one is installed; the results are in Redis."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from kombu import Connection

from batchery import DeviceDied
from benchmarks.rabbitmq import OwnRabbitMQ, find_rabbitmq
from conftest import StartWorker
from support.harness import Worker, device_busy, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)

PROGRAM = find_rabbitmq()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no RabbitMQ is installed here")


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnRabbitMQ]:
    assert PROGRAM
    made = OwnRabbitMQ(tmp_path_factory.mktemp("rabbitmq"), PROGRAM)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def amqp(rabbitmq: OwnRabbitMQ, redis_url: str) -> Iterator[Celery]:
    """A client of it."""
    app = Celery("amqp", broker=rabbitmq.url, backend=redis_url, set_as_current=False)
    yield app
    backend: Any = app.backend
    backend.result_consumer.stop()
    app.close()


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, rabbitmq: OwnRabbitMQ) -> Worker:
    return start_module_worker("apps.shop", env={"CELERY_BROKER_URL": rabbitmq.url})


def send_apart(amqp: Celery, task: str, items: list[Any], **keywords: Any) -> list[Any]:
    """Sends jobs to a queue that the module's worker leaves alone."""
    name = f"apps.stages.{task}"
    return [amqp.send_task(name, [item], keywords, queue="apart") for item in items]


def waiting(url: str) -> int:
    """Messages of that queue that no worker holds."""
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        return int(channel.queue_declare("apart", passive=True).message_count)


def test_jobs_that_wait_share_a_batch(amqp: Celery, worker: Worker, tmp_path: Path) -> None:
    with device_busy(worker, amqp, "apps.shop.until", tmp_path / "gate"):
        jobs = [amqp.send_task("apps.shop.read_batch", [number]) for number in range(100)]
    results = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert [result["item"] for result in results] == list(range(100))
    assert max(len(result["mates"]) for result in results) > 1


@pytest.mark.usefixtures("worker")
def test_a_chain(amqp: Celery) -> None:
    first = amqp.signature("apps.shop.shout", args=("a",), app=amqp)
    second = amqp.signature("apps.shop.bound", app=amqp)
    assert chain(first, second, app=amqp)().get(timeout=TIMEOUT_S) == "apps.shop.bound:A"


@pytest.mark.usefixtures("worker")
def test_a_retry(amqp: Celery, tmp_path: Path) -> None:
    job = amqp.send_task("apps.shop.third_time", [str(tmp_path / "attempts")])
    assert job.get(timeout=TIMEOUT_S) == 3


@pytest.mark.usefixtures("worker")
def test_a_countdown(amqp: Celery) -> None:
    job = amqp.send_task("apps.shop.shout", ["later"], countdown=0.5)
    assert job.get(timeout=TIMEOUT_S) == "LATER"


def test_a_job_that_is_revoked_while_it_waits_never_runs(
    amqp: Celery, worker: Worker, tmp_path: Path
) -> None:
    with device_busy(worker, amqp, "apps.shop.until", tmp_path / "gate"):
        job = amqp.send_task("apps.shop.shout", ["never"])
        amqp.control.revoke(job.id, reply=True, timeout=TIMEOUT_S, limit=1)
    with pytest.raises(TaskRevokedError):
        job.get(timeout=TIMEOUT_S)


def test_a_warm_shutdown_finishes_what_runs_and_gives_back_the_rest(
    start_worker: StartWorker, rabbitmq: OwnRabbitMQ, amqp: Celery, tmp_path: Path
) -> None:
    options: Any = {"env": {"CELERY_BROKER_URL": rabbitmq.url}}
    first = start_worker("apps.stages", "-Q", "apart", **options)
    gate = tmp_path / "gate"
    running = send_apart(amqp, "gated", [0], gate=str(gate))[0]
    wait_for((tmp_path / "gate.begun").exists, "the job runs")
    rest = send_apart(amqp, "lengths", ["four"] * 10)
    wait_for(lambda: len(first.inspect(amqp, "reserved")) == 10, "it has the rest")
    first.process.terminate()
    wait_for(lambda: "Warm shutdown" in first.log, "the shutdown has begun")
    gate.touch()
    assert first.wait_exit() == 0
    assert running.get(timeout=TIMEOUT_S)
    assert not any(job.ready() for job in rest)
    wait_for(lambda: waiting(rabbitmq.url) == 10, "the broker has them again")
    second = start_worker("apps.stages", "-Q", "apart", **options)
    assert [job.get(timeout=TIMEOUT_S) for job in rest] == [4] * 10
    assert second.stop() == 0
    wait_for(lambda: waiting(rabbitmq.url) == 0, "none is left")


def test_job_that_runs_while_the_connection_breaks_is_executed_once(
    start_worker: StartWorker, rabbitmq: OwnRabbitMQ, amqp: Celery, tmp_path: Path
) -> None:
    worker = start_worker("apps.stages", "-Q", "apart", env={"CELERY_BROKER_URL": rabbitmq.url})
    gate, begun = tmp_path / "gate", tmp_path / "gate.begun"
    running = send_apart(amqp, "gated", [0], gate=str(gate))[0]
    wait_for(begun.exists, "the job runs")
    rabbitmq.drop_connections()
    wait_for(lambda: f"[{running.id}] was redelivered while it runs" in worker.log, "it came again")
    gate.touch()
    assert running.get(timeout=TIMEOUT_S) == worker.devices()[0].pid
    assert worker.stop() == 0
    wait_for(lambda: waiting(rabbitmq.url) == 0, "none is left")
    assert begun.read_text() == "begun\n"


@pytest.mark.usefixtures("worker")
def test_job_that_kills_its_device_fails_alone(amqp: Celery) -> None:
    texts = ["a", "b", "die", "c"]
    jobs = [amqp.send_task("apps.shop.nasty", [text]) for text in texts]
    for text, job in zip(texts, jobs, strict=True):
        if text == "die":
            with pytest.raises(DeviceDied, match="2 times, so it is not run again"):
                job.get(timeout=TIMEOUT_S)
        else:
            assert job.get(timeout=TIMEOUT_S) == text.upper()


@pytest.mark.usefixtures("worker")
def test_job_that_takes_too_long_ends_with_its_device(amqp: Celery) -> None:
    job = amqp.send_task("apps.shop.stubborn", [patient(600)])
    with pytest.raises(TimeLimitExceeded):
        job.get(timeout=TIMEOUT_S)
    assert amqp.send_task("apps.shop.shout", ["on"]).get(timeout=TIMEOUT_S) == "ON"
