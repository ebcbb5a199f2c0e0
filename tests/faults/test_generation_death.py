"""A device or a worker dies while texts are written: each is that of `generate`, and comes once."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from redis import Redis

from batchery import Client
from conftest import StartWorker
from support.harness import Worker, unsettled, wait_ended, wait_for
from support.patience import patient
from support.tiny_writers import PlainWriter, make_prompts, save_writer

TIMEOUT_S = patient(90)

COUNT = 100


class Wanted:
    """Jobs, and the texts that they must have."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        choose = random.Random(6)
        self.jobs = [(prompt, choose.randint(4, 60)) for prompt in make_prompts(COUNT)]
        plain = PlainWriter(folder)
        self.texts = [plain.text(plain.write(*job)) for job in self.jobs]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    return Wanted(save_writer(tmp_path_factory.mktemp("writer")))


class Writing:
    """All the jobs in random order, a third of them read as streams, and what became of them."""

    def __init__(self, wanted: Wanted, client: Celery, redis_url: str) -> None:
        self._wanted = wanted
        self._client = client
        self._redis_url = redis_url
        self._redis: Any = Redis.from_url(redis_url)
        self._told = self._redis.pubsub()  # type: ignore[no-untyped-call]
        self._told.psubscribe("celery-task-meta-*")
        assert self._told.get_message(timeout=TIMEOUT_S)["type"] == "psubscribe"
        self._caller = Client(redis_url)
        self._threads = ThreadPoolExecutor(COUNT)
        self.cancelled: set[int] = set()
        self._choose = random.Random(8)
        order = self._choose.sample(range(COUNT), COUNT)
        self._heard = dict.fromkeys(order[::3], "")
        self._ids: dict[int, str] = {}
        self._reading: list[Any] = []
        self._late = order[-COUNT // 3 :]
        self._send(order[: -COUNT // 3])

    def _send(self, names: Sequence[int]) -> None:
        chat = self._caller.task("chat")
        for name in names:
            prompt, tokens = self._wanted.jobs[name]
            if name in self._heard:
                stream = chat.stream(prompt, timeout_s=TIMEOUT_S, max_new_tokens=tokens)
                self._ids[name] = stream.id
                self._reading.append(self._threads.submit(self._read, name, stream))
            else:
                self._ids[name] = chat.delay(prompt, max_new_tokens=tokens).id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._caller.close()
        self._told.close()
        self._redis.close()

    def _read(self, name: int, stream: Any) -> None:
        with suppress(TaskRevokedError):  # How a cancelled one ends.
            for piece in stream:
                self._heard[name] += piece["text"]

    def ended(self) -> int:
        """How many jobs have."""
        keys = [f"celery-task-meta-{task_id}" for task_id in self._ids.values()]
        return int(self._redis.exists(*keys))

    def cancel_some(self) -> None:
        """Cancels jobs that run, that wait, or that have ended."""
        chosen = self._choose.sample(sorted(self._ids), 8)
        self.cancelled.update(chosen)
        ids = [self._ids[name] for name in chosen]
        self._client.control.revoke(ids, terminate=True)

    def stop_midway(self, device: psutil.Process) -> None:
        """Stops the device when some have ended, and others were cancelled; sends the last ones."""
        wait_for(lambda: self.ended() >= 10, "some have ended", TIMEOUT_S)
        self.cancel_some()
        wait_for(lambda: self.ended() >= 25, "more have ended", TIMEOUT_S)
        self.cancel_some()
        # However many have ended by now: these cannot.
        device.suspend()
        self._send(self._late)
        assert self.ended() <= COUNT - len(self._late)

    def check(self) -> None:
        """Waits for all; each must have ended once, with the text of `generate`."""
        revoked = set()
        for name, task_id in self._ids.items():
            try:
                result = self._client.AsyncResult(task_id).get(timeout=TIMEOUT_S)
            except TaskRevokedError:
                revoked.add(name)
            else:
                assert result["text"] == self._wanted.texts[name]
        assert revoked <= self.cancelled
        for each in self._reading:
            each.result(TIMEOUT_S)
        for name, heard in self._heard.items():
            text = self._wanted.texts[name]
            # A worker forgets with its death what it was told to cancel: then the job may succeed,
            # but the reader was told already that it will not.
            if name in self.cancelled:
                assert text.startswith(heard)
            else:
                assert heard == text
        wait_for(lambda: unsettled(self._redis_url) == 0, "no lease is left", TIMEOUT_S)
        told = self._count_told()
        once = {self._ids[name] for name in set(range(COUNT)) - self.cancelled}
        assert {task_id: told[task_id] for task_id in once} == dict.fromkeys(once, 1)

    def _count_told(self) -> Counter[str]:
        """How often the end of each job was announced."""
        told: Counter[str] = Counter()
        while message := self._told.get_message(timeout=0.5):
            told[json.loads(message["data"])["task_id"]] += 1
        return told


@pytest.fixture
def start(start_worker: StartWorker, wanted: Wanted) -> Callable[[], Worker]:
    chat = {"kind": "generation", "model": str(wanted.folder), "slots": 8, "cache_tokens": 1024}
    env = {"BATCHERY_MODELS": json.dumps({"chat": chat})}
    return lambda: start_worker("batchery.app", "-c", "1", "-Q", "chat", env=env)


def test_texts_of_a_killed_device(
    start: Callable[[], Worker], wanted: Wanted, client: Celery, redis_url: str
) -> None:
    worker = start()
    (device,) = worker.devices()
    with Writing(wanted, client, redis_url) as writing:
        writing.stop_midway(device)
        device.kill()
        writing.cancel_some()
        writing.check()
    assert device.pid not in {each.pid for each in worker.devices()}


def test_texts_of_a_killed_worker(
    start: Callable[[], Worker], wanted: Wanted, client: Celery, redis_url: str
) -> None:
    first = start()
    (device,) = first.devices()
    with Writing(wanted, client, redis_url) as writing:
        writing.stop_midway(device)
        first.process.kill()
        device.resume()
        wait_ended([device])
        start()
        writing.cancel_some()
        writing.check()
