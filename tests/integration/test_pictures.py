"""Pictures through a real worker: wherever they are, and whatever is wrong with them."""

import base64
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
from support.harness import Worker, wait_for
from support.patience import patient
from support.picture_host import PictureHost
from support.pictures import draw_many
from support.served_pictures import PICTURE, list_readers, make_folder, make_variables

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def host() -> Iterator[PictureHost]:
    with PictureHost(PICTURE) as host:
        yield host


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, folder: Path) -> Worker:
    return start_module_worker("batchery.app", "-E", env=make_variables(folder))


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
    "number": (7, "must be bytes, base64, a URL or a path"),
    "sound": ({"audio": "one.png"}, "must have one of the fields image, text"),
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
    asked = host.slow
    slow = [send(client, host.url("/slow")) for _ in range(20)]
    wait_for(lambda: host.slow == asked + 20, "all are being fetched")
    assert all(send(client, each).get(timeout=TIMEOUT_S) for each in draw_many(8))
    assert not any(job.ready() for job in slow)
    host.gate.set()
    assert all(job.get(timeout=TIMEOUT_S)["vector"] for job in slow)
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
