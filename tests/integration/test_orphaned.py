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
from batchery.transport.redis_schema import Keys, transport_scripts
from support.commands import TIMEOUT_S, run
from support.harness import Worker, wait_for
from support.metrics_port import Exporter
from support.own_redis import OwnRedis
from support.patience import patient

WAITING, LEASED, OLDEST = (
    (f"batchery_queue_{name}", shop.until.name)
    for name in ("waiting_jobs", "leased_jobs", "oldest_job_seconds")
)


def send(url: str, gate: Path, jobs: int) -> None:
    """Sends jobs that end when there is a file, and one for later."""
    with Celery(broker=url, set_as_current=False) as app:
        install(app)
        copied = app.task(name=shop.until.name, base=BatchTask, shared=False)
        until: BatchTask = copied(shop.until.run)
        for _ in range(jobs):
            until.delay(str(gate))
        until.apply_async((str(gate),), eta=datetime.now(UTC) + timedelta(hours=1))


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
        send(own_redis.url, gate, jobs)

        def total() -> float:
            found = exporter.samples()
            return found[WAITING] + found[LEASED] if found[LEASED] else 0

        wait_for(lambda: total() == jobs + 1, "they are counted, and some are held")
        worker.process.send_signal(number)

        def are_free() -> bool:
            found = exporter.samples()
            return (found[WAITING], found[LEASED]) == (jobs + 1, 0)

        wait_for(are_free, "all of them wait", patient(30))
        found = exporter.samples()
        assert found[OLDEST] > 1
        assert found["batchery_scheduled_jobs",] == 0
        command = ("batchery", "doctor", "--json", "-A", "apps.shop")
        code, out, err = run(own_redis.url, *command, cwd=tmp_path)
        assert code == 2, err
        text = {each["check"]: each["found"] for each in json.loads(out)["findings"]}
        assert text["queue-unserved"].startswith(f"{jobs + 1} jobs in queue {shop.until.name!r}")
        assert "worker-none" in text
        _, out, err = run(own_redis.url, "batchery", "stats", "-A", "apps.shop", "--once")
        assert "of these jobs are held by dead workers" in " ".join(out.split()), err
        gate.touch()
        if number == signal.SIGSTOP:
            # It is fenced if another worker was there meanwhile, and else goes on.
            worker.process.send_signal(signal.SIGCONT)
        else:
            other = Worker(tmp_path, own_redis.url, "apps.shop", "-c", "1")
            stack.callback(other.kill)

        def is_done() -> bool:
            found = exporter.samples()
            return (found[WAITING], found[LEASED], found["batchery_scheduled_jobs",]) == (0, 1, 1)

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
        assert (alive.queues["a"], alive.leased["a"], alive.orphaned) == (0, 5, {})
        server.zadd(Keys().workers, {"w": (now_s - 40) * 1000})
        found = survey(own_redis.url)
    assert found.leased == {"a": 0, "b": 0}
    assert found.queues == found.orphaned
    assert sum(found.queues.values()) == 1000
    assert 500 < found.queues["a"] < 950
    assert 59 < (found.oldest_s["b"] or 0) < 59 + patient(30)


def test_both_those_in_the_queue_and_those_of_dead_workers_wait(own_redis: OwnRedis) -> None:
    with Redis.from_url(own_redis.url) as client:
        server: Any = client
        now_s = float(server.time()[0])
        server.lpush("a", message(now_s - 60), message(now_s))
        for worker, sent_s in (("v", now_s - 500), ("w", now_s)):
            server.zadd(Keys().workers, {worker: 1})
            server.hset(Keys().lease(worker), "7", f"a\0{message(sent_s)}")
        server.zadd(Keys().workers, {"empty": 1})
        found = survey(own_redis.url)
    assert (found.queues, found.orphaned) == ({"a": 4}, {"a": 2})
    assert 499 < (found.oldest_s["a"] or 0) < 499 + patient(30)


def test_what_is_too_large_to_read_counts_for_the_queues_of_the_last_heartbeat(
    own_redis: OwnRedis,
) -> None:
    with Redis.from_url(own_redis.url) as client:
        server: Any = client
        server.zadd(Keys().workers, {"w": 1, "gone": 1})
        server.hset(Keys().worker_info, "w", '{"leased": {"a": 1, "b": 3}}')
        server.hset(Keys().worker_info, "gone", '{"leased": {"a": 1}}')
        large = {n: f"a\0{message(1.0, 'x' * 2**20)}" for n in range(8)}
        server.hset(Keys().lease("w"), mapping=large)
        found = survey(own_redis.url)
    assert found.queues == {"a": 2, "b": 6}
    assert found.oldest_s == {"a": None, "b": None}


def test_some_of_what_a_worker_holds_is_read_and_all_is_counted(bare: Any) -> None:
    scripts, key = transport_scripts(bare), Keys().lease("w")
    assert scripts.run("count_leased", [key]) == [0]

    def lease(token: int, queue: str, sent_at: object, body: str = "") -> None:
        value = f'{queue}\0{{"body": "{body}", "headers": {{"batchery_sent_at": {sent_at}}}}}'
        bare.hset(key, str(token), value)

    lease(10, "b", "1.2.3")
    lease(9, "a", 1764170000.123456)
    lease(11, "a", 1764160000.5)
    # The first one taken is read first.
    answer = scripts.run("count_leased", [key])
    assert answer == [3, b"a", 2, b"1764160000.500000", b"b", 1, b""]
    # There is no room for this one, so that its queue is not known.
    lease(8, "c", 5, "x" * 2**20)
    assert scripts.run("count_leased", [key]) == [4, *answer[1:]]
    bare.hdel(key, "8")
    for token in range(1000, 1500):
        lease(token, "a", 7)
    total, *lists = scripts.run("count_leased", [key])
    assert (total, sum(lists[1::3])) == (503, 100)
