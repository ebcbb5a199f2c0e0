"""Pictures through a real worker: wherever they are, whatever is wrong, and whoever dies."""

import base64
import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery

from batchery.errors import InvalidItem
from batchery.transport.payloads import Payloads
from conftest import StartWorker
from support.harness import Worker, command_line, leased, queue_length, wait_ended, wait_for
from support.patience import patient
from support.picture_host import PictureHost
from support.pictures import draw, draw_many, encode, save_vision_model

TIMEOUT_S = patient(60)

PICTURE = encode(draw(64, 48))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has models, and below `photos` a picture."""
    folder = tmp_path_factory.mktemp("pictures")
    save_vision_model(folder / "clip", "clip")
    (folder / "photos").mkdir()
    (folder / "photos" / "one.png").write_bytes(PICTURE)
    (folder / "secret.png").write_bytes(PICTURE)
    (folder / "photos" / "way-out.png").symlink_to(folder / "secret.png")
    (folder / "photos" / "way-up").symlink_to(folder)
    os.mkfifo(folder / "photos" / "pipe.png")
    return folder


@pytest.fixture(scope="module")
def host() -> Iterator[PictureHost]:
    with PictureHost(PICTURE) as host:
        yield host


def settings(folder: Path, host: PictureHost, **media: Any) -> dict[str, str]:
    model = {"kind": "image_embedding", "model": str(folder / "clip"), "max_batch_size": 16}
    media = {"roots": [str(folder / "photos")], "hosts": ["127.0.0.1"], **media}
    return {"BATCHERY_MODELS": json.dumps({"see": model}), "BATCHERY_MEDIA": json.dumps(media)}


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, folder: Path, host: PictureHost) -> Worker:
    return start_module_worker("batchery.app", "-E", env=settings(folder, host))


def send(client: Celery, item: Any, **keywords: Any) -> Any:
    return client.send_task("see", [item], keywords, queue="see")


def test_a_picture_has_the_same_vector_wherever_it_is(
    worker: Worker, client: Celery, folder: Path, host: PictureHost
) -> None:
    payloads = Payloads.open(client)
    assert payloads is not None
    payloads.client.set(payloads.key("abc"), PICTURE, ex=60)
    text = base64.b64encode(PICTURE).decode()
    items = [
        PICTURE,
        {"base64": text},
        {"image": PICTURE},
        {"image": {"base64": text}},
        f"data:image/png;base64,{text}",
        "one.png",
        str(folder / "photos" / "one.png"),
        "batchery:abc",
        host.url("/picture"),
        host.url("/redirect"),
        {"image": host.url("/picture")},
    ]
    first, *others = [job.get(timeout=TIMEOUT_S) for job in [send(client, each) for each in items]]
    assert len(first["vector"]) == 24
    for each in others:
        assert each["vector"] == pytest.approx(first["vector"], abs=1e-6)


BAD = {
    "no such file": ("two.png", "there is no such file below media.roots"),
    "outside": ("../secret.png", "there is no such file below media.roots"),
    "a link that leads out": ("way-out.png", "there is no such file below media.roots"),
    "a folder link": ("way-up/secret.png", "there is no such file below media.roots"),
    "a pipe": ("pipe.png", "is no file"),
    "a folder": (".", "is no file"),
    "absolute": ("/etc/passwd", "there is no such file below media.roots"),
    "file URL": ("file:///etc/passwd", "is no URL of a host"),
    "another host": ("http://127.0.0.2/x", "is not allowed"),
    "no picture": (b"nothing", "is no picture of a format that is read"),
    "truncated": (PICTURE[:-200], "truncated"),
    "gone": ("batchery:gone", "is not in Redis"),
    "number": (7, "must be bytes, base64, a URL or a path, not int"),
    "sound": ({"audio": "one.png"}, "must have one of image, text"),
}


def test_bad_pictures_fail_alone(worker: Worker, client: Celery, host: PictureHost) -> None:
    urls = {
        "/missing": "answered 404",
        "/loop": "redirects",
        "/redirect-elsewhere": "is not allowed",
        "/endless": "more than media.max_bytes",
        "/large": "more than media.max_bytes",
    }
    bad = [*BAD.values(), *((host.url(path), problem) for path, problem in urls.items())]
    good = [send(client, each) for each in draw_many(8)]
    jobs = [(send(client, item), problem) for item, problem in bad]
    for job, problem in jobs:
        with pytest.raises(InvalidItem) as error:
            job.get(timeout=TIMEOUT_S)
        assert problem in str(error.value)
        assert "\n" not in str(error.value)
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in good)


def list_readers(worker: Worker) -> list[psutil.Process]:
    """The processes that read items: those that were forked by the first one."""
    family = psutil.Process(worker.pid).children(recursive=True)
    first = [each for each in family if "media.reader_process" in command_line(each)]
    return [each for each in first if each.ppid() in {other.pid for other in first}]


def test_readers_that_are_killed_lose_nothing(worker: Worker, client: Celery) -> None:
    pictures = draw_many(12)
    expected = [send(client, each).get(timeout=TIMEOUT_S)["vector"] for each in pictures]
    jobs = []
    for _ in range(8):
        jobs += [(send(client, each), at) for at, each in enumerate(pictures)]
        for each in list_readers(worker):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    # An item fails only if both its readers were killed.
    outcomes = [(job.get(timeout=TIMEOUT_S, propagate=False), at) for job, at in jobs]
    good = [(each, at) for each, at in outcomes if not isinstance(each, InvalidItem)]
    assert len(good) > len(jobs) * 0.7
    for result, at in good:
        assert result["vector"] == pytest.approx(expected[at], abs=1e-5)


def test_a_slow_host_keeps_nobody_out(worker: Worker, client: Celery, host: PictureHost) -> None:
    slow = [send(client, host.url("/slow")) for _ in range(20)]
    wait_for(lambda: host.slow == 20, "all are being fetched")
    assert all(send(client, each).get(timeout=TIMEOUT_S) for each in draw_many(8))
    assert not any(job.ready() for job in slow)
    host.gate.set()
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in slow)
    host.gate.clear()


def test_a_device_that_dies_while_pictures_are_read_loses_nothing(
    start_worker: StartWorker, client: Celery, folder: Path, host: PictureHost, redis_url: str
) -> None:
    worker = start_worker("batchery.app", env=settings(folder, host))
    send(client, PICTURE).get(timeout=TIMEOUT_S)
    asked = host.slow
    jobs = [send(client, each) for each in [host.url("/slow"), *draw_many(40)]]
    wait_for(lambda: host.slow > asked, "one of them is being fetched")
    readers = list_readers(worker)
    assert readers
    (device,) = worker.devices()
    device.kill()
    wait_ended([device, *readers])
    host.gate.set()
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in jobs)
    host.gate.clear()
    wait_for(lambda: leased(redis_url) == 0, "no job is held any more")


def test_what_is_being_read_goes_back_when_the_worker_ends(
    start_worker: StartWorker, client: Celery, folder: Path, host: PictureHost, redis_url: str
) -> None:
    worker = start_worker("batchery.app", env=settings(folder, host))
    asked = host.slow
    jobs = [send(client, host.url("/slow")) for _ in range(5)]
    wait_for(lambda: host.slow == asked + 5, "all are being fetched")
    readers = psutil.Process(worker.pid).children(recursive=True)
    # As a service is stopped: all its processes are told.
    for each in readers:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    assert worker.stop() == 0
    assert (queue_length(redis_url, "see"), leased(redis_url)) == (5, 0)
    wait_ended(readers)
    host.gate.set()
    start_worker("batchery.app", env=settings(folder, host))
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in jobs)
    host.gate.clear()


def test_revoked_while_it_is_being_read(worker: Worker, client: Celery, host: PictureHost) -> None:
    asked = host.slow
    job = send(client, host.url("/slow"))
    wait_for(lambda: host.slow > asked, "it is being fetched")
    client.control.revoke(job.id)
    wait_for(lambda: job.id in worker.inspect(client, "revoked"), "the worker knows")
    host.gate.set()
    wait_for(lambda: job.state == "REVOKED", "it is revoked")
    host.gate.clear()
