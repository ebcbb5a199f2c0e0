"""What a dead worker holds waits, in all figures, until a worker that lives gives it back."""

import contextlib
import json
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu.transport.redis import Channel
from redis import Redis

from apps import shop
from batchery import BatchTask, install
from batchery.cli.survey import Survey
from batchery.cli.survey import survey as look
from batchery.transport.redis_schema import Keys
from support.commands import run
from support.harness import Worker, wait_for
from support.metrics_port import Exporter
from support.own_redis import OwnRedis
from support.patience import TIMEOUT_S, patient

WAITING, LEASED, OLDEST = (
    (f"batchery_queue_{name}", shop.until.name)
    for name in ("waiting_jobs", "leased_jobs", "oldest_job_seconds")
)
SCHEDULED = ("batchery_scheduled_jobs",)


def send(url: str, gate: Path, jobs: int, eta: datetime | None = None) -> None:
    """Sends jobs that end when there is a file."""
    with Celery(broker=url, set_as_current=False) as app:
        install(app)
        copied = app.task(name=shop.until.name, base=BatchTask, shared=False)
        until: BatchTask = copied(shop.until.run)
        for _ in range(jobs):
            until.apply_async((str(gate),), eta=eta)


@pytest.mark.parametrize(("number", "jobs"), [(signal.SIGKILL, 9), (signal.SIGSTOP, 300)])
def test_jobs_of_the_only_worker_wait_once_it_is_dead_or_frozen(
    own_redis: OwnRedis, tmp_path: Path, number: int, jobs: int
) -> None:
    gate = tmp_path / "gate"
    worker = Worker(tmp_path, own_redis.url, "apps.shop", "-c", "1")
    with contextlib.ExitStack() as stack:
        stack.callback(worker.kill)
        worker.wait_ready()
        exporter = Exporter(own_redis.url)
        stack.callback(exporter.close)
        send(own_redis.url, gate, 1, datetime.now(UTC) + timedelta(hours=1))
        wait_for(lambda: exporter.samples()[SCHEDULED] == 1, "nobody holds a job for later")
        send(own_redis.url, gate, jobs)

        def total() -> float:
            found = exporter.samples()
            return found[WAITING] + found[LEASED] if found[LEASED] else 0

        wait_for(lambda: total() == jobs, "they are counted, and some are held")
        worker.process.send_signal(number)

        def are_free() -> bool:
            found = exporter.samples()
            return (found[WAITING], found[LEASED]) == (jobs, 0)

        wait_for(are_free, "all of them wait", patient(30))
        found = exporter.samples()
        assert found[OLDEST] > 1
        assert found[SCHEDULED] == 1
        command = ("batchery", "doctor", "--json", "-A", "apps.shop")
        code, out, err = run(own_redis.url, *command, cwd=tmp_path)
        assert code == 2, err
        text = {each["check"]: each["found"] for each in json.loads(out)["findings"]}
        assert text["queue-unserved"].startswith(f"{jobs} jobs in queue {shop.until.name!r}")
        assert "worker-none" in text
        gate.touch()
        if number == signal.SIGSTOP:
            # It is fenced if another worker was there meanwhile, and else goes on.
            worker.process.send_signal(signal.SIGCONT)
        else:
            other = Worker(tmp_path, own_redis.url, "apps.shop", "-c", "1")
            stack.callback(other.kill)

        def is_done() -> bool:
            found = exporter.samples()
            return (found[WAITING], found[LEASED], found[SCHEDULED]) == (0, 0, 1)

        wait_for(is_done, "only the job for later is left", TIMEOUT_S)


def survey(url: str) -> Survey:
    with Celery(broker=url, set_as_current=False) as app:
        return look(app, 1.0, ["a"], asks=False)


def message(sent_s: float, body: str = "") -> str:
    return json.dumps({"body": body, "headers": {"batchery_sent_at": sent_s}})


def test_of_many_leases_a_sample_says_whose_they_are(own_redis: OwnRedis) -> None:
    step = f"b{Channel.sep}9"
    with Redis.from_url(own_redis.url) as client:
        server: Any = client
        now_s = float(server.time()[0])
        leases = {n: f"{'a' if n % 4 else step}\0{message(now_s - 60)}" for n in range(1000)}
        server.hset(Keys().lease("w"), mapping=leases)
        server.hset(Keys().worker_info, "w", '{"expiry_s": 30, "leased": {"a": 5}}')
        # Older than its own expiry, not yet; then it is.
        server.zadd(Keys().workers, {"w": (now_s - 10) * 1000})
        alive = survey(own_redis.url)
        assert (alive.queues["a"], alive.leased["a"]) == (0, 5)
        server.zadd(Keys().workers, {"w": (now_s - 40) * 1000})
        found = survey(own_redis.url)
    assert found.leased == {"a": 0, "b": 0}
    assert sum(found.queues.values()) == 1000
    assert 500 < found.queues["a"] < 950
    assert 59 < (found.oldest_s["b"] or 0) < 59 + patient(30)
