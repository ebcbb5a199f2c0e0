"""Device and worker die in the middle of a hundred transcriptions: nothing is lost or left."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from batchery import Client, put_media
from batchery_producer.media import remove_media
from conftest import StartWorker
from support.harness import Worker, wait_ended, wait_for
from support.patience import patient
from support.served_sounds import make_variables, transcribe_here
from support.sounds import make_recording

TIMEOUT_S = patient(180)

pytestmark = pytest.mark.timeout(patient(400))

#: Of many windows, read along; and as many of one or two as make up a hundred.
LONG = [make_recording(15, seed) for seed in range(4)]
SHORT = [make_recording(1 + seed / 2, seed) for seed in range(6)]
COUNT = 100 - len(LONG)
WINDOWS = 7


@pytest.fixture
def caller(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


class Families:
    """The processes of workers, and the shared memory that they have."""

    def __init__(self) -> None:
        self.processes = list[psutil.Process]()
        self._shared = set[str]()

    def note(self, worker: Worker) -> None:
        """Notes what a worker has now."""
        for each in psutil.Process(worker.pid).children(recursive=True):
            with suppress(psutil.Error):
                maps = [found.path for found in each.memory_maps()]
                self.processes.append(each)
                self._shared |= {path for path in maps if path.startswith("/dev/shm/")}

    def are_gone(self) -> bool:
        """Waits for the ends of all; returns whether nothing of them is left."""
        wait_ended(self.processes)
        return not any(map(os.path.exists, self._shared))


def count_told(channel: Any) -> Counter[str]:
    """How many times each result was announced."""
    told = Counter[str]()
    while (message := channel.get_message(timeout=0.1)) is not None:
        if message["type"] == "pmessage":
            told[message["channel"].decode().removeprefix("celery-task-meta-")] += 1
    return told


def test_a_hundred_transcriptions_outlive_their_device_and_their_worker(
    start_worker: StartWorker, client: Celery, caller: Client, store: Any, tmp_path: Path
) -> None:
    folder, files = tmp_path / "models", tmp_path / "files"
    files.mkdir()
    variables = {**make_variables(folder, "whisper"), "TMPDIR": str(files)}
    worker = start_worker("batchery.app", env=variables)
    channel = store.pubsub()
    channel.psubscribe("celery-task-meta-*")
    references = [put_media(client, each, expires_s=600) for each in SHORT]
    streams = [caller.task("whisper").stream(each, timeout_s=TIMEOUT_S) for each in LONG]
    items = [(SHORT, references)[at % 2][at % len(SHORT)] for at in range(COUNT)]
    jobs = [client.send_task("whisper", [each], queue="whisper") for each in items]

    def count_done() -> int:
        return sum(job.ready() for job in jobs)

    heard = [[next(stream)] for stream in streams]
    families = Families()
    families.note(worker)
    (device,) = worker.devices()
    device.kill()
    wait_ended([device])
    done = count_done()
    wait_for(lambda: count_done() > done + 8, "another device goes on", TIMEOUT_S)
    families.note(worker)
    worker.process.kill()
    worker.process.wait()
    assert families.are_gone()
    assert count_done() < COUNT
    worker = start_worker("batchery.app", env=variables)
    for pieces, stream in zip(heard, streams, strict=True):
        pieces += stream
    results = [job.get(timeout=TIMEOUT_S) for job in jobs]

    alone = transcribe_here(folder, "whisper", [*LONG, *SHORT])
    assert results == [alone[len(LONG) + at % len(SHORT)] for at in range(COUNT)]
    assert [stream.result for stream in streams] == alone[: len(LONG)]
    # No window was told twice, and none is missing.
    for pieces, result in zip(heard, alone, strict=False):
        assert "".join(piece["text"] for piece in pieces) == result["text"]
        assert sum(len(piece["windows"]) for piece in pieces) == WINDOWS
    ids = [*(job.id for job in jobs), *(stream.id for stream in streams)]
    assert count_told(channel) == dict.fromkeys(ids, 1)
    channel.close()

    families.note(worker)
    assert worker.stop() == 0
    assert families.are_gone()
    # Whoever kills a worker of Celery leaves an empty folder of its pool.
    assert not [each for each in files.rglob("*") if not each.name.startswith("pymp-")]
    for each in references:
        remove_media(client, each)
    # Results and pieces expire. What is of the queues is there as soon as a worker was.
    lasting = {key.decode() for key in store.scan_iter() if store.ttl(key) == -1}
    queues = {each for each in lasting if each.startswith("_kombu.binding")}
    assert lasting - queues <= {"batchery:schema", "batchery:token"}
