"""Speech over HTTP: OpenAI's client, unmodified, in front of a real worker with tiny models."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from celery import Celery

from batchery import Client
from conftest import StartGateway, StartWorker
from support.gateway import EMBED, GatewayProcess
from support.harness import Worker, queue_length, unsettled, wait_for
from support.patience import patient
from support.sounds import RATE, make_recording, save_sound_model, write_sound

Models = dict[str, dict[str, Any]]

URL = "/v1/audio/transcriptions"

#: One travels with its message, the other one by reference: it is longer than 64 KiB.
SHORT, LONG = make_recording(1.5, seed=1), make_recording(8.2, seed=2)

MAX_BYTES = 300_000

WAIT_S = patient(60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    found: Models = {"embed": EMBED["embed"]}
    for name, architecture in (("hear", "whisper"), ("spell", "wav2vec2")):
        save_sound_model(folder / name, architecture)
        found[name] = {"kind": "transcription", "model": str(folder / name)}
    found["hear"]["aliases"] = ["whisper-1"]
    return found


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, models: Models) -> Worker:
    served = {name: models[name] for name in ("hear", "spell")}
    return start_module_worker("batchery.app", env={"BATCHERY_MODELS": json.dumps(served)})


@pytest.fixture(scope="module")
def gateway(start_gateway: StartGateway, worker: Worker, models: Models) -> GatewayProcess:
    media = json.dumps({"max_bytes": MAX_BYTES})
    return start_gateway(models=models, environment={"BATCHERY_MEDIA": media})


@pytest.fixture
def api(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, as it comes."""
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def hear(redis_url: str, recording: bytes, **keywords: Any) -> dict[str, Any]:
    """What a Celery client gets."""
    with Client(redis_url) as client:
        found: dict[str, Any] = client.task("hear").delay(recording, **keywords).get(timeout=WAIT_S)
    return found


def media_keys(store: Any) -> list[Any]:
    return list(store.scan_iter("batchery:media:*"))


@pytest.fixture(autouse=True)
def nothing_stays_behind(store: Any) -> Iterator[None]:
    yield
    wait_for(lambda: not media_keys(store), "no recording is left in Redis")


@pytest.mark.parametrize("recording", [SHORT, LONG], ids=["short", "long"])
def test_all_formats_say_what_a_celery_client_gets(
    api: openai.OpenAI, redis_url: str, recording: bytes
) -> None:
    whole = hear(redis_url, recording)
    text, segments = whole["text"].strip(), whole["segments"]
    assert text
    asked: Any = {"model": "whisper-1", "file": ("call.wav", recording)}
    create = api.audio.transcriptions.create
    plain = create(**asked)
    assert (plain.text, plain.usage.seconds) == (text, whole["duration_s"])
    assert create(**asked, response_format="text") == f"{text}\n"
    verbose = create(**asked, response_format="verbose_json")
    assert (verbose.text, verbose.language, verbose.duration) == (
        text,
        whole["language"],
        whole["duration_s"],
    )
    assert [(each.id, each.start, each.end, each.text) for each in verbose.segments] == [
        (number, each["start_s"], each["end_s"], each["text"])
        for number, each in enumerate(segments)
    ]
    srt, vtt = (create(**asked, response_format=each) for each in ("srt", "vtt"))
    times = r"^\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}$"
    assert len(re.findall(times, srt, re.MULTILINE)) == len(segments)
    assert srt.startswith("1\n00:00:00,")
    assert vtt.startswith("WEBVTT\n\n1\n00:00:00.")
    assert vtt.count(" --> ") == len(segments)


def test_words_have_times(api: openai.OpenAI, redis_url: str) -> None:
    words = hear(redis_url, SHORT, timestamps="word")["words"]
    asked: Any = {"model": "hear", "file": ("a.wav", SHORT), "response_format": "verbose_json"}
    found = api.audio.transcriptions.create(**asked, timestamp_granularities=["word"])
    assert found.segments is None
    assert [(each.word, each.start, each.end) for each in found.words] == [
        (each["text"].strip(), each["start_s"], each["end_s"]) for each in words
    ]
    both = api.audio.transcriptions.create(**asked, timestamp_granularities=["word", "segment"])
    assert both.words == found.words
    assert both.segments


def test_language_prompt_and_temperature_go_to_the_model(
    api: openai.OpenAI, redis_url: str
) -> None:
    asked: Any = {"model": "hear", "file": ("a.wav", LONG), "response_format": "verbose_json"}
    found = api.audio.transcriptions.create(**asked, language="de", prompt="fit", temperature=0)
    whole = hear(redis_url, LONG, language="de", prompt="fit")
    assert (found.text, found.language) == (whole["text"].strip(), "de")
    with pytest.raises(openai.BadRequestError, match="language = 'xx'") as raised:
        api.audio.transcriptions.create(**asked, language="xx")
    assert raised.value.param == "language"


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_translation_is_another_task_of_the_model(api: openai.OpenAI, redis_url: str) -> None:
    whole = hear(redis_url, LONG, task="translate")
    asked: Any = {"model": "hear", "file": ("a.wav", LONG)}
    assert api.audio.translations.create(**asked).text == whole["text"].strip()
    verbose: Any = api.audio.translations.create(**asked, response_format="verbose_json")
    assert (verbose.task, len(verbose.segments)) == ("translate", len(whole["segments"]))
    assert " --> " in str(api.audio.translations.create(**asked, response_format="srt"))


@pytest.mark.parametrize("model", ["hear", "spell"])
def test_a_stream_has_the_text_in_pieces(api: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "file": ("call.wav", LONG)}
    whole = api.audio.transcriptions.create(**asked).text
    *deltas, done = api.audio.transcriptions.create(**asked, stream=True)
    assert {each.type for each in deltas} == {"transcript.text.delta"}
    assert (done.type, done.text) == ("transcript.text.done", whole)
    assert "".join(each.delta for each in deltas).strip() == whole


def test_a_broken_recording_ends_a_stream_before_it_begins(api: openai.OpenAI) -> None:
    asked: Any = {"model": "hear", "file": ("call.wav", b"RIFF" * 30_000)}
    with pytest.raises(openai.BadRequestError, match="audio: "):
        api.audio.transcriptions.create(**asked, stream=True)


def post(gateway: GatewayProcess, data: bytes | None = SHORT, **fields: Any) -> httpx2.Response:
    files = {} if data is None else {"file": ("call.wav", data)}
    return gateway.post(URL, data={"model": "hear", **fields}, files=files)


@pytest.mark.parametrize(
    ("data", "fields", "status", "named"),
    [
        (None, {"prompt": "x"}, 400, "file: Field required"),
        (None, {"file": "call.wav"}, 400, "file: expected a file, sent as multipart/form-data"),
        (b"", {}, 400, "audio: is empty"),
        (b"no sound at all", {}, 400, "audio: "),
        (b"x" * (MAX_BYTES + 1), {}, 413, f"more than media.max_bytes = {MAX_BYTES}"),
        (b"x" * (MAX_BYTES + 2_000_000), {}, 413, "the body is larger than"),
        (SHORT, {"model": "embed"}, 404, "is of kind embedding, not transcription"),
        (SHORT, {"model": "whisper-9"}, 404, "no such model of kind transcription"),
        (SHORT, {"response_format": "mp3"}, 400, "response_format: Input should be 'json'"),
        (SHORT, {"temperature": "2"}, 400, "temperature: "),
        (SHORT, {"timestamp_granularities[]": "line"}, 400, "timestamp_granularities.0: Input"),
        (SHORT, {"include[]": "logprobs"}, 400, "include: "),
        (SHORT, {"prompt": "x" * 20_000}, 400, "maximum size"),
        (SHORT, {"model": "spell", "language": "de"}, 400, "a CTC model takes timestamps alone"),
    ],
)
def test_bad_request_says_what_is_wrong(
    gateway: GatewayProcess, data: bytes | None, fields: dict[str, str], status: int, named: str
) -> None:
    answer = post(gateway, data, **fields)
    assert (answer.status_code, named in answer.text) == (status, True), answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_what_is_no_form_and_pages_of_others_are_refused(gateway: GatewayProcess) -> None:
    answer = gateway.post(URL, {"model": "hear", "file": "call.wav"})
    assert (answer.status_code, "file: Field required" in answer.text) == (400, True)
    headers = {"origin": "https://evil.example"}
    answer = gateway.post(URL, data={"model": "hear"}, files={"file": SHORT}, headers=headers)
    assert answer.status_code == 403


def test_a_caller_who_hangs_up_leaves_neither_job_nor_recording(
    gateway: GatewayProcess, worker: Worker, client: Celery, store: Any, redis_url: str
) -> None:
    client.control.cancel_consumer("hear", reply=True, timeout=WAIT_S, limit=1)
    try:
        request = httpx2.Request(
            "POST", f"{gateway.url}{URL}", data={"model": "hear"}, files={"file": ("a.wav", LONG)}
        )
        head = [f"POST {URL} HTTP/1.1", *(f"{k}: {v}" for k, v in request.headers.items()), "", ""]
        with gateway.connect() as caller:
            caller.sendall("\r\n".join(head).encode() + request.read())
            wait_for(lambda: queue_length(redis_url, "hear") == 1, "its job waits")
            (key,) = media_keys(store)
            assert store.strlen(key) == len(LONG)
            # If the gateway is killed now, Redis forgets it.
            assert 0 < store.ttl(key) < 3600
        wait_for(lambda: not media_keys(store), "its recording is gone")
    finally:
        client.control.add_consumer("hear", reply=True, timeout=WAIT_S, limit=1)
    wait_for(lambda: not queue_length(redis_url, "hear") and not unsettled(redis_url), "no job")


def test_a_stream_that_is_left_leaves_no_recording(
    gateway: GatewayProcess, api: openai.OpenAI, store: Any
) -> None:
    asked: Any = {"model": "hear", "file": ("call.wav", LONG), "stream": True}
    with api.audio.transcriptions.create(**asked) as events:
        next(iter(events))
    wait_for(lambda: not media_keys(store), "its recording is gone")


def test_a_recording_whose_words_cannot_be_put_together_fails_alone(
    gateway: GatewayProcess, worker: Worker
) -> None:
    """Tokens of random models are none that transformers expects with times of words."""
    noise = write_sound(np.random.default_rng(1).uniform(-1, 1, 7 * RATE))
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    devices = worker.devices()
    answer = post(gateway, noise, **fields, language="en")
    assert answer.status_code == 200 or "cannot be put together" in answer.text
    assert worker.devices() == devices
