"""Devices, workers and Redis die while streams are read: no gap, and no piece twice."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchery import Client
from conftest import StartWorker
from support.harness import Worker, open_redis, wait_for
from support.own_redis import OwnRedis
from support.patience import patient

TIMEOUT_S = patient(90)

TEXTS = [f"the story of number {number}" for number in range(12)]


@pytest.fixture
def caller(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


def start(start_worker: StartWorker, **options: Any) -> Worker:
    return start_worker("apps.streaming", "-c", "1", "-Q", "celery,speller", **options)


def leases(redis_url: str) -> list[Any]:
    """The keys of the workers that hold leases."""
    with open_redis(redis_url) as redis:
        return list(redis.scan_iter("batchery:lease:*"))


class Readers:
    """Reads texts to their ends, each on a thread."""

    def __init__(self, caller: Client, gate: Path, texts: list[str]) -> None:
        self.streams = [
            caller.task("speller").stream(text, timeout_s=TIMEOUT_S, gate=str(gate))
            for text in texts
        ]
        self.heard = [""] * len(texts)
        self._threads = ThreadPoolExecutor(len(texts))
        self._reading = [self._threads.submit(self._read, n) for n in range(len(texts))]

    def _read(self, number: int) -> None:
        for piece in self.streams[number]:
            self.heard[number] += piece

    def wait_half(self, count: int) -> None:
        """Waits until so many texts have come to their gate."""

        def halves() -> int:
            return sum(
                len(heard) >= len(text) // 2 for heard, text in zip(self.heard, TEXTS, strict=False)
            )

        wait_for(lambda: halves() >= count, "they are at the gate", TIMEOUT_S)

    def results(self) -> list[dict[str, Any]]:
        for each in self._reading:
            each.result(TIMEOUT_S)
        self._threads.shutdown()
        return [each.result for each in self.streams]


def test_texts_go_on_after_the_death_of_their_device(
    start_worker: StartWorker, caller: Client, tmp_path: Path
) -> None:
    worker, gate = start(start_worker), tmp_path / "gate"
    readers = Readers(caller, gate, TEXTS)
    readers.wait_half(8)
    for each in worker.devices():
        each.kill()
    gate.touch()
    results = readers.results()
    assert readers.heard == TEXTS == [each["text"] for each in results]
    # Eight were in slots: they have gone on, and not begun anew.
    halves = [each["resumed"] for each in results if each["resumed"]]
    assert halves == [text[: len(text) // 2] for text in TEXTS[:8]]


def test_texts_go_on_in_another_worker(
    start_worker: StartWorker, caller: Client, tmp_path: Path
) -> None:
    first, gate = start(start_worker), tmp_path / "gate"
    readers = Readers(caller, gate, TEXTS)
    readers.wait_half(8)
    first.kill()
    gate.touch()
    start(start_worker)
    results = readers.results()
    assert readers.heard == TEXTS
    assert sum(bool(each["resumed"]) for each in results) == 8


def test_a_function_that_runs_again_repeats_nothing(
    start_worker: StartWorker, caller: Client, tmp_path: Path
) -> None:
    worker, gate = start(start_worker), tmp_path / "gate"
    gated = caller.task("apps.streaming.gated", queue="celery")
    pieces = gated.stream(str(gate), timeout_s=TIMEOUT_S)
    assert [next(pieces) for _ in range(5)] == list(range(5))
    for each in worker.devices():
        each.kill()
    gate.touch()
    assert list(pieces) == list(range(5, 10))


def test_pieces_of_a_late_worker_are_refused(
    start_worker: StartWorker, caller: Client, redis_url: str, tmp_path: Path
) -> None:
    """Its main process hangs, so its leases end; its device goes on, and does not know."""
    late, gate = start(start_worker), tmp_path / "gate"
    readers = Readers(caller, gate, TEXTS[:3])
    readers.wait_half(3)
    late_pids = {each.pid for each in late.devices()}
    (held,) = leases(redis_url)
    os.kill(late.pid, signal.SIGSTOP)
    try:
        start(start_worker)
        wait_for(lambda: leases(redis_url) not in ([], [held]), "the leases are taken over")
        gate.touch()
        results = readers.results()
    finally:
        os.kill(late.pid, signal.SIGCONT)
    assert readers.heard == TEXTS[:3]
    assert not late_pids & {each["pid"] for each in results}


def test_pieces_wait_for_a_redis_that_is_away(
    start_worker: StartWorker, own_redis: OwnRedis, tmp_path: Path
) -> None:
    """The device generates meanwhile: its text is complete before Redis is back."""
    url = own_redis.url
    start(start_worker, env={"CELERY_BROKER_URL": url, "CELERY_RESULT_BACKEND": url})
    gate = tmp_path / "gate"
    with Client(url) as caller:
        readers = Readers(caller, gate, TEXTS[:4])
        readers.wait_half(4)
        own_redis.kill()
        gate.touch()
        threading.Event().wait(1.0)
        own_redis.start()
        readers.results()
        assert readers.heard == TEXTS[:4]
