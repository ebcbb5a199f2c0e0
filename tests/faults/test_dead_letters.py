"""Jobs that kill device or worker each time: they alone become dead letters, their mates live."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import NotRegistered

from apps import killers, lethal
from apps.killers import batches
from batchery import DeviceDied, InvalidItem
from batchery.transport.dead_letters import DeadLetter, DeadLetters
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = patient(90)

#: Of the batch task of `apps.leases`.
QUEUE = "apps.leases.batch"


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    killers.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def dead_letters_of(redis_url: str) -> list[DeadLetter]:
    with open_redis(redis_url) as client:
        return list(DeadLetters(client))


def suspects(redis_url: str) -> Any:
    with open_redis(redis_url) as client:
        return client.hgetall("batchery:suspects")


class Restarted:
    """A worker that is started again each time that it dies."""

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self._worker = start()
        self.deaths = 0

    def until(self, condition: Callable[[], Any], what: str) -> None:
        def done() -> Any:
            if self._worker.process.poll() is not None:
                self.deaths += 1
                self._worker = self._start()
            return condition()

        wait_for(done, what, patient(300))


@pytest.mark.timeout(400)
def test_a_job_that_kills_its_worker_is_a_dead_letter_and_nobody_else_is_blamed(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    texts = ["kill-worker" if number == 20 else f"mate-{number}" for number in range(64)]
    texts += [f"innocent-{number}" for number in range(30)]
    jobs = killers.obey.submit_many(texts, {"folder": str(tmp_path)})
    worker = Restarted(lambda: start_worker("apps.killers", ready=False))
    worker.until(lambda: all(job.ready() for job in jobs), "all jobs answered")
    for job, text in zip(jobs, texts, strict=True):
        if text != "kill-worker":
            assert job.get(timeout=TIMEOUT_S) == text.upper()
    with pytest.raises(
        DeviceDied, match="alone when its device or worker died; that happened 2 times"
    ):
        jobs[20].get(timeout=TIMEOUT_S)
    wait_for(lambda: dead_letters_of(redis_url), "a dead letter")
    assert [letter.id for letter in dead_letters_of(redis_url)] == [jobs[20].id]
    # Once among its mates, once in a half of them, and twice alone; more often where a loaded
    # machine held up the worker that looked on, so that it was not sure enough to count a death.
    assert worker.deaths >= 4
    begun = batches(tmp_path)
    sizes = [len(batch) for batch in begun if "kill-worker" in batch]
    assert [size for size, _ in itertools.groupby(sizes)] == [64, 32, 1]
    assert sizes.count(1) >= 2
    lonely = [batch for batch in begun if batch[0].startswith("mate") and len(batch) == 1]
    assert len(lonely) == 31
    # Those that were in the same worker were on no device.
    assert sum("innocent-7" in batch for batch in begun) == 1
    wait_for(lambda: not suspects(redis_url), "nobody is a suspect any more")
    # Somebody has mended the task. A new result each time, as one that is known is not asked for.
    (tmp_path / "pardon").touch()
    with open_redis(redis_url) as client:
        letters = DeadLetters(client)
        assert len(letters.requeue(letters.tokens())) == 1
    name = jobs[20].id
    worker.until(lambda: killers.app.AsyncResult(name).state == "SUCCESS", "success")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("item", ["crash", "exit"])
def test_message_whose_delivery_ends_worker_after_worker_is_a_dead_letter(
    start_worker: StartWorker, redis_url: str, item: str
) -> None:
    lethal.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    send = lethal.shout.delay
    jobs = [send("before"), send(item), send("after")]
    worker = Restarted(lambda: start_worker("apps.lethal", "-P", "threads", ready=False))
    worker.until(lambda: all(job.ready() for job in jobs), "all jobs answered")
    assert [job.get(timeout=TIMEOUT_S).lower() for job in (jobs[0], jobs[2])] == ["before", "after"]
    with pytest.raises(InvalidItem, match="ended 2 workers"):
        jobs[1].get(timeout=TIMEOUT_S)
    wait_for(lambda: dead_letters_of(redis_url), "a dead letter")
    assert [letter.id for letter in dead_letters_of(redis_url)] == [jobs[1].id]
    wait_for(lambda: not suspects(redis_url), "nobody is a suspect any more")


@pytest.mark.parametrize("item", ["out of memory", "no file", "no key"])
def test_message_whose_delivery_raises_is_a_dead_letter_and_its_worker_lives(
    start_worker: StartWorker, redis_url: str, item: str
) -> None:
    lethal.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_worker("apps.lethal", "-P", "threads")
    send = lethal.shout.delay
    jobs = [send("before"), send(item), send("after")]
    for job in (jobs[0], jobs[2]):
        job.get(timeout=TIMEOUT_S)
    with pytest.raises(InvalidItem, match="as told"):
        jobs[1].get(timeout=TIMEOUT_S)
    wait_for(lambda: dead_letters_of(redis_url), "a dead letter")
    assert [letter.id for letter in dead_letters_of(redis_url)] == [jobs[1].id]
    assert worker.process.poll() is None
    assert "Connection to broker lost" not in worker.log


@pytest.mark.parametrize(
    ("task", "shadow", "error"),
    [
        ("apps.leases.batch", "two\nlines", InvalidItem),
        ("nobody.knows.me", "a line", NotRegistered),
    ],
)
def test_caller_of_a_refused_message_hears_of_it_though_its_worker_and_results_go_away(
    start_worker: StartWorker,
    redis_url: str,
    own_redis: OwnRedis,
    task: str,
    shadow: str,
    error: type[Exception],
) -> None:
    def start() -> Worker:
        return start_worker("apps.leases", env={"CELERY_RESULT_BACKEND": own_redis.url})

    worker = start()
    own_redis.kill()
    with Celery("sender", broker=redis_url, backend=own_redis.url, set_as_current=False) as app:
        # Without a backend, as a client asks for the result when it sends.
        with Celery("asks-nothing", broker=redis_url, set_as_current=False) as sender:
            task_id = sender.send_task(task, ["x"], shadow=shadow, queue=QUEUE).id
        wait_for(lambda: "kept as dead letter" in worker.log, "it is refused")
        # A whole turn of the loop later.
        with open_redis(redis_url) as client:
            client.lpush(QUEUE, "{")
            wait_for(lambda: "cannot be understood" in worker.log, "the next one is, too")
        worker.kill()
        own_redis.start()
        start()
        with pytest.raises(error):
            app.AsyncResult(task_id).get(timeout=TIMEOUT_S)
        wait_for(lambda: len(dead_letters_of(redis_url)) == 2, "dead letters")


@pytest.mark.timeout(400)
def test_items_of_one_message_that_kill_the_device_fail_alone(
    start_worker: StartWorker, redis_url: str, tmp_path: Path
) -> None:
    start_worker("apps.killers")
    keywords = {"folder": str(tmp_path)}
    texts = ["die" if number in (3, 11) else f"mate-{number}" for number in range(16)]
    job = killers.obey.apply_async((texts,), keywords, headers={"batchery": {"v": 1, "n": 16}})
    others = killers.obey.submit_many([f"other-{number}" for number in range(8)], keywords)
    assert others.get(timeout=TIMEOUT_S) == [f"OTHER-{number}" for number in range(8)]
    entries = job.get(timeout=TIMEOUT_S)
    found = [entry.get("ok") or entry["error"]["type"] for entry in entries]
    assert found == ["DeviceDied" if text == "die" else text.upper() for text in texts]
    assert "item 3 ended its device" in entries[3]["error"]["message"]
    # Each of them twice alone, and before that only beside others.
    assert batches(tmp_path).count(["die"]) == 4
    assert dead_letters_of(redis_url) == []
    wait_for(lambda: not suspects(redis_url), "nothing is noted any more")
