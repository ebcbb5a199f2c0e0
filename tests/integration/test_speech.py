"""Sound through a real worker: several recordings at once, their pieces, and bad ones."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import AsyncClient, Client, InvalidItem
from conftest import StartWorker
from support.harness import Worker
from support.patience import patient
from support.served_sounds import make_variables, transcribe_here
from support.sounds import LABELS, make_recording, write_header

TIMEOUT_S = patient(90)

RECORDINGS = [make_recording(seconds, seed) for seed, seconds in enumerate((1, 9, 2.5, 20, 5))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sounds")


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, folder: Path) -> Worker:
    tasks = ("whisper", "ctc", "label", "hear")
    return start_module_worker("batchery.app", env=make_variables(folder, *tasks))


@pytest.fixture
def caller(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


def send(client: Celery, task: str, item: Any, **keywords: Any) -> Any:
    return client.send_task(task, [item], keywords, queue=task)


# Of transformers, where a window has one token.
@pytest.mark.filterwarnings("ignore:std")
def test_recordings_have_the_results_that_they_have_alone(
    worker: Worker, client: Celery, folder: Path
) -> None:
    for task, keywords in (("whisper", {"timestamps": "word"}), ("ctc", {})):
        jobs = [send(client, task, each, **keywords) for each in RECORDINGS]
        alone = transcribe_here(folder, task, RECORDINGS, **keywords)
        assert [job.get(timeout=TIMEOUT_S) for job in jobs] == alone


def test_pieces_are_the_segments_of_the_result(worker: Worker, caller: Client) -> None:
    streams = [caller.task("whisper").stream(each, timeout_s=TIMEOUT_S) for each in RECORDINGS]
    for stream in streams:
        segments = [segment for piece in stream for segment in piece["segments"]]
        assert segments == stream.result["segments"]
        assert "".join(each["text"] for each in segments) == stream.result["text"]


def test_asyncio_reads_the_same_pieces(worker: Worker, redis_url: str) -> None:
    async def read() -> tuple[str, Any]:
        async with AsyncClient(redis_url) as client:
            stream = client.task("whisper").stream(RECORDINGS[3], timeout_s=TIMEOUT_S)
            text = "".join([piece["text"] async for piece in stream])
            return text, stream.result

    text, result = asyncio.run(read())
    assert text == result["text"]


def test_sounds_have_labels_and_vectors(worker: Worker, client: Celery) -> None:
    jobs = [send(client, "label", each, top_k=3) for each in RECORDINGS]
    jobs += [send(client, "hear", each) for each in (*RECORDINGS, {"text": "a dog"})]
    results = [job.get(timeout=TIMEOUT_S) for job in jobs]
    assert {each["label"] for each in results[:5]} <= {*LABELS.values()}
    assert {len(each["vector"]) for each in results[5:]} == {24}


BAD = {
    "no sound": (b"nothing", "audio: cannot be decoded"),
    "silent": (write_header(bytes(32_000)), "audio: is silent"),
    "no samples": (write_header(b""), "audio: has no samples"),
    "unknown codec": (write_header(bytes(9000), codec=0x5555), "audio: its codec is not known"),
    "a picture": ({"image": "one.png"}, "audio: must have one of the fields audio"),
    "a text": ({"text": "hello"}, "audio: must have one of the fields audio"),
    "a list": ({"text": ["hello"]}, "audio: must have one of the fields audio"),
    "not there": ("two.wav", "there is no such file below media.roots"),
}


def test_bad_recordings_fail_alone(worker: Worker, client: Celery) -> None:
    good = [send(client, "whisper", each) for each in RECORDINGS]
    jobs = [(send(client, "whisper", item), problem) for item, problem in BAD.values()]
    for job, problem in jobs:
        with pytest.raises(InvalidItem) as error:
            job.get(timeout=TIMEOUT_S)
        assert problem in str(error.value)
        assert "\n" not in str(error.value)
    assert all(job.get(timeout=TIMEOUT_S)["text"] for job in good)
