"""A real Whisper behind a worker recognises what a voice says."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchery import Client
from conftest import StartWorker
from support.packaged_whisper import PACKAGE, convert, find_model
from support.patience import patient
from support.voice import PACKAGE as VOICE
from support.voice import has_voice, speak

TIMEOUT_S = patient(120)

pytestmark = [
    pytest.mark.skipif(find_model() is None, reason=f"{PACKAGE} is not installed"),
    pytest.mark.skipif(not has_voice(), reason=f"{VOICE} is not installed"),
    pytest.mark.timeout(patient(300)),
]

SENTENCES = [
    "It was the best of times, it was the worst of times.",
    "My telephone number is one two three four five six.",
    "The rain falls on green hills, while the river runs to the sea.",
]


@pytest.fixture
def caller(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as made:
        yield made


def find_words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_spoken_words_are_recognised(
    start_worker: StartWorker, caller: Client, tmp_path: Path
) -> None:
    model = find_model()
    assert model is not None
    convert(model, tmp_path / "whisper")
    models = {"listen": {"kind": "transcription", "model": str(tmp_path / "whisper")}}
    start_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(models)})
    listen = caller.task("listen")
    recordings = [speak(each) for each in SENTENCES]
    # Long enough for several windows.
    recordings.append(speak(" ".join(SENTENCES * 4)))
    streams = [listen.stream(each, timeout_s=TIMEOUT_S, timestamps="word") for each in recordings]
    for stream in streams:
        "".join(piece["text"] for piece in stream)
    times, number, river, long = [stream.result for stream in streams]
    assert find_words(times["text"]) == find_words(SENTENCES[0])
    assert [find_words(each["text"])[0] for each in times["words"]] == find_words(SENTENCES[0])
    assert re.sub(r"\D", "", number["text"]) == "123456"
    assert "while the river runs to the sea" in river["text"]
    assert long["duration_s"] > 30
    assert long["text"].count("the river runs to the sea") == 4
    assert re.sub(r"\D", "", long["text"]) == 4 * "123456"
