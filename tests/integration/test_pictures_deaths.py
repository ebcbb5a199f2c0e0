"""Who dies while pictures are read loses nothing, and leaves nothing behind."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from conftest import StartWorker
from support.harness import leased, queue_length, wait_ended, wait_for
from support.patience import patient
from support.picture_host import PictureHost
from support.pictures import draw_many
from support.served_pictures import PICTURE, list_readers, make_folder, make_variables

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def host() -> Iterator[PictureHost]:
    with PictureHost(PICTURE) as host:
        yield host


def send(client: Celery, item: Any) -> Any:
    return client.send_task("see", [item], queue="see")


def test_a_device_that_dies_while_pictures_are_read_loses_nothing(
    start_worker: StartWorker, client: Celery, folder: Path, host: PictureHost, redis_url: str
) -> None:
    worker = start_worker("batchery.app", env=make_variables(folder))
    send(client, PICTURE).get(timeout=TIMEOUT_S)
    jobs = [send(client, each) for each in [host.url("/slow"), *draw_many(40)]]
    wait_for(lambda: host.slow, "one of them is being fetched")
    readers = list_readers(worker)
    assert readers
    (device,) = worker.devices()
    device.kill()
    wait_ended([device, *readers])
    host.gate.set()
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in jobs)
    wait_for(lambda: leased(redis_url) == 0, "no job is held any more")


def test_what_is_being_read_goes_back_when_the_worker_ends(
    start_worker: StartWorker, client: Celery, folder: Path, host: PictureHost, redis_url: str
) -> None:
    worker = start_worker("batchery.app", env=make_variables(folder))
    jobs = [send(client, host.url("/slow")) for _ in range(5)]
    wait_for(lambda: host.slow == 5, "all are being fetched")
    readers = psutil.Process(worker.pid).children(recursive=True)
    # As a service is stopped: all its processes are told.
    for each in readers:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    assert worker.stop() == 0
    assert (queue_length(redis_url, "see"), leased(redis_url)) == (5, 0)
    wait_ended(readers)
    host.gate.set()
    start_worker("batchery.app", env=make_variables(folder))
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in jobs)
