"""Transcription: what transformers' pipeline says of each recording, whoever shares its passes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from batchery import InvalidItem, ModelLoadError, Transcription
from batchery.execution.batch import prepare
from batchery.execution.steps import SlotItem, Slots, run_steps
from batchery.media_settings import MediaSettings
from batchery.model import GOES_ON
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.audio import transcription
from batchery_worker.models.audio.decoding import decode_audio
from batchery_worker.models.audio.transcription import TranscriptionModel
from support.sounds import RATE, WINDOW_S, make_recording
from support.tiny_models import Build

#: Shorter than a window, as long as one, and of many.
SECONDS = (0.7, 3.0, 4.1, 7.3, 1.6)
RECORDINGS = [make_recording(seconds, seed) for seed, seconds in enumerate(SECONDS)]

#: CTC models have windows of half a minute, as they do not say.
LONG = [make_recording(seconds, seed) for seed, seconds in enumerate((1.3, 31.0, 0.4, 58.5))]


# Of transformers, which looks for the times of words in a window with one token.
pytestmark = pytest.mark.filterwarnings("ignore:std")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is slow, and steps would have one window each."""
    monkeypatch.setattr(transcription, "MAX_STEP_S", 1000.0)


def load(folder: Path, **settings: Any) -> TranscriptionModel:
    model = TranscriptionModel(ModelSettings(kind="transcription", model=str(folder), **settings))
    model.load("cpu")
    return model


def transcribe(model: TranscriptionModel, items: Sequence[Any], **keywords: Any) -> list[Any]:
    return run_steps(model, prepare(model, items, keywords), keywords)


class Plain:
    """The pipeline of transformers, for one recording at a time."""

    def __init__(self, folder: Path, window_s: float) -> None:
        make: Any = transformers.pipeline
        self.pipe = make("automatic-speech-recognition", model=str(folder), device="cpu")
        self._window_s = window_s

    def transcribe(
        self, recording: bytes, timestamps: str | None, **options: Any
    ) -> tuple[str, list[Any]]:
        given = {"segment": True, None: None}.get(timestamps, timestamps)
        found = self.pipe(
            decode_audio(recording, RATE, 3600),
            chunk_length_s=self._window_s,
            return_timestamps=given,
            **({"generate_kwargs": options} if options else {}),
        )
        return found["text"], found.get("chunks", [])


def as_chunks(parts: Sequence[Mapping[str, Any]], chunks: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Parts of a result as the pipeline writes them, without the times that it does not know."""
    return [
        {
            "text": part["text"],
            "timestamp": tuple(
                None if known is None else time
                for time, known in zip(
                    (part["start_s"], part["end_s"]), chunk["timestamp"], strict=True
                )
            ),
        }
        for part, chunk in zip(parts, chunks, strict=True)
    ]


@pytest.mark.parametrize("timestamps", ["segment", "word", "none"])
def test_whisper_says_what_the_pipeline_says_one_by_one(
    build_sound: Build, timestamps: str
) -> None:
    folder = build_sound("whisper-en")
    plain = Plain(folder, WINDOW_S)
    found = transcribe(load(folder), RECORDINGS, timestamps=timestamps)
    for result, recording, seconds in zip(found, RECORDINGS, SECONDS, strict=True):
        Transcription.model_validate(result)
        assert result["duration_s"] == pytest.approx(seconds, abs=0.01)
        wanted = None if timestamps == "none" else timestamps
        text, chunks = plain.transcribe(recording, wanted, num_beams=1)
        if timestamps == "word":
            assert as_chunks(result["words"], chunks) == chunks
            text, chunks = plain.transcribe(recording, "segment", num_beams=1)
        assert result["text"] == text
        assert as_chunks(result.get("segments", []), chunks) == chunks


def test_words_have_their_own_times_where_the_language_is_known(build_sound: Build) -> None:
    folder = build_sound("whisper")
    model, plain = load(folder), Plain(folder, WINDOW_S)
    for each in (model.model, plain.pipe.model):
        # Windows end within a text, as those of noise do.
        each.generation_config.max_length = 12
    found = transcribe(model, RECORDINGS, timestamps="word", language="de")
    for result, recording in zip(found, RECORDINGS, strict=True):
        options = {"language": "de", "task": "transcribe", "num_beams": 1}
        _, chunks = plain.transcribe(recording, "word", **options)
        assert as_chunks(result["words"], chunks) == chunks
    assert any(result["words"] for result in found)


def test_window_of_whisper_says_what_generate_says(build_sound: Build) -> None:
    folder = build_sound("whisper-en")
    plain = Plain(folder, WINDOW_S).pipe
    short = [each for each, seconds in zip(RECORDINGS, SECONDS, strict=True) if seconds <= WINDOW_S]
    found = transcribe(load(folder), short, timestamps="none")
    for result, recording in zip(found, short, strict=True):
        inputs = plain.feature_extractor(
            decode_audio(recording, RATE, 60),
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
        )
        tokens = plain.model.generate(**inputs)
        assert result["text"] == plain.tokenizer.decode(tokens[0], skip_special_tokens=True)


def test_jobs_of_several_languages_share_passes(build_sound: Build) -> None:
    folder = build_sound("whisper")
    model, plain = load(folder), Plain(folder, WINDOW_S)
    languages = [None, "en", "german", None, "DE"]
    prepared = prepare(model, RECORDINGS, {})
    slots: Slots[int] = Slots(model, 8)
    slots.add(
        *(
            SlotItem(at, each, {"language": language} if language else {}, ())
            for at, (each, language) in enumerate(zip(prepared, languages, strict=True))
        )
    )
    found: dict[int, Any] = {}
    while len(found) < len(prepared):
        found |= {at: outcome for at, _, outcome in slots.step() if outcome is not GOES_ON}
    codes = {"german": "de", "DE": "de"}
    for at, (recording, language) in enumerate(zip(RECORDINGS, languages, strict=True)):
        options = {"language": codes.get(language, language)} if language else {}
        text, _ = plain.transcribe(recording, "segment", num_beams=1, task="transcribe", **options)
        assert found[at]["text"] == text
        assert found[at]["language"] in ([options["language"]] if options else ["en", "de", "fr"])


def test_prompt_and_task_are_those_of_generate(build_sound: Build) -> None:
    folder = build_sound("whisper")
    plain = Plain(folder, WINDOW_S)
    keywords = {"language": "de", "task": "translate", "prompt": "a cat"}
    model = load(folder)
    found = transcribe(model, RECORDINGS[:3], **keywords)
    prompt = plain.pipe.tokenizer.get_prompt_ids("a cat", return_tensors="pt")
    options = {"language": "de", "task": "translate", "prompt_ids": prompt, "num_beams": 1}
    usual = transcribe(model, RECORDINGS[:3], language="de")
    assert [each["text"] for each in found] != [each["text"] for each in usual]
    for result, recording in zip(found, RECORDINGS[:3], strict=True):
        assert result["text"] == plain.transcribe(recording, "segment", **options)[0]


@pytest.mark.parametrize("architecture", ["wav2vec2", "wav2vec2-unmasked"])
def test_ctc_says_what_the_pipeline_says_one_by_one(build_sound: Build, architecture: str) -> None:
    folder = build_sound(architecture)
    plain = Plain(folder, 30)
    items = [*RECORDINGS[:3], *LONG]
    found = transcribe(load(folder), items, timestamps="word")
    untimed = transcribe(load(folder), items, timestamps="none")
    for result, other, recording in zip(found, untimed, items, strict=True):
        Transcription.model_validate(result)
        text, chunks = plain.transcribe(recording, "word")
        assert result["text"] == other["text"] == text
        assert as_chunks(result["words"], chunks) == chunks
        words = " ".join(each["text"] for each in result["words"])
        assert "".join(each["text"] for each in result["segments"]) == words
        assert other.keys() == {"text", "language", "duration_s"}


def drive(
    model: TranscriptionModel, prepared: Any, pieces: Sequence[Any], **keywords: Any
) -> Iterator[tuple[Any, Any]]:
    """Pieces and outcomes of a recording alone, one step after the other."""
    model.is_streamed = True
    model.join(0, prepared, pieces, **keywords)
    while True:
        for _, piece, outcome in model.step():
            if piece is not None:
                # They go through Redis.
                yield json.loads(json.dumps(piece)), None
            if outcome is not GOES_ON:
                yield None, outcome
                return


@pytest.mark.parametrize("timestamps", ["segment", "word", "none"])
@pytest.mark.parametrize("architecture", ["whisper-en", "wav2vec2"])
def test_recording_goes_on_behind_its_pieces(
    build_sound: Build, architecture: str, timestamps: str
) -> None:
    model = load(build_sound(architecture), slots=1)
    recording = LONG[3] if architecture == "wav2vec2" else RECORDINGS[3]
    keywords: dict[str, Any] = {"timestamps": timestamps}
    (prepared,) = prepare(model, [recording], keywords)
    *told, (_, whole) = drive(model, prepared, (), **keywords)
    pieces = [piece for piece, _ in told]
    segments = [each for piece in pieces for each in piece["segments"]]
    assert segments == whole.get("segments", [])
    assert len(pieces) == model.tokens(prepared) > 2
    if timestamps != "none":
        # The first ones come before the end.
        assert any(piece["segments"] for piece in pieces[:-1])
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for count in (0, 2, len(pieces)):
        (prepared,) = prepare(model, [recording], keywords)
        *others, (_, outcome) = drive(model, prepared, pieces[:count], **keywords)
        assert outcome == whole
        again = [each for piece, _ in others for each in piece["segments"]]
        before = [each for piece in pieces[:count] for each in piece["segments"]]
        assert before + again == segments


def test_unread_recording_that_makes_room_loses_nothing(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"), slots=1)
    (prepared,) = prepare(model, RECORDINGS[3:4], {})
    model.is_streamed = False
    model.join(0, prepared, ())
    model.step()
    model.step()
    pieces = model.leave(0)
    assert pieces is not None
    assert sum(len(piece["windows"]) for piece in pieces) == 2
    # It has its memory no longer than it must.
    assert len(prepared.windows) == model.tokens(prepared) - 2
    model.join(0, prepared, pieces)
    steps = 1
    while (outcome := model.step()[-1].outcome) is GOES_ON:
        steps += 1
    assert steps == model.tokens(prepared) - 2
    assert outcome == transcribe(model, RECORDINGS[3:4])[0]


def test_short_recording_does_not_wait_for_a_long_one(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"), slots=4)
    prepared = prepare(model, [make_recording(20), *RECORDINGS[:2]], {})
    slots: Slots[int] = Slots(model, 4)
    slots.add(SlotItem(0, prepared[0], {}, ()))
    for _ in range(3):
        slots.step()
    slots.add(*(SlotItem(at, prepared[at], {}, ()) for at in (1, 2)))
    ended = {at for at, _, outcome in slots.step() if outcome is not GOES_ON}
    assert ended == {1, 2}


def test_jobs_with_other_keywords_have_passes_of_their_own(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"), slots=4)
    slots: Slots[int] = Slots(model, 4)
    kinds: list[dict[str, Any]] = [{}, {"timestamps": "none"}]
    for at in range(4):
        (each,) = prepare(model, [make_recording(5, at)], kinds[at % 2])
        slots.add(SlotItem(at, each, kinds[at % 2], ()))
    found: dict[int, Any] = {}
    while len(found) < 4:
        found |= {at: outcome for at, _, outcome in slots.step() if outcome is not GOES_ON}
    for at, result in found.items():
        keywords: dict[str, Any] = kinds[at % 2]
        assert result == transcribe(model, [make_recording(5, at)], **keywords)[0]


def test_bad_recording_fails_alone(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"))
    items = [RECORDINGS[0], b"no sound", {"audio": RECORDINGS[1]}, 7, {"text": "a word"}]
    good, *others = transcribe(model, items)
    assert good["text"]
    assert others[1]["text"]
    for failed in (others[0], others[2], others[3]):
        assert isinstance(failed, Failed)
        assert isinstance(failed.exception, InvalidItem)


def test_recording_has_a_minimum_length(build_sound: Build) -> None:
    model = load(build_sound("wav2vec2"))
    short, long = prepare(model, [make_recording(0.09), make_recording(0.1)], {})
    assert str(short.exception) == "audio: has 0.090 seconds, fewer than 0.1"
    assert run_steps(model, [long], {})[0]["duration_s"] == 0.1


def test_what_transformers_refuses_fails_its_job_alone(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"))
    # More than the model may write behind such a prompt.
    model._speech._pipe.model.generation_config.max_new_tokens = 40
    prompt = {"prompt": "a word " * 20}
    keywords: list[dict[str, Any]] = [{}, prompt, {}]
    slots: Slots[int] = Slots(model, 3)
    for at, (recording, each) in enumerate(zip(RECORDINGS, keywords, strict=False)):
        slots.add(SlotItem(at, prepare(model, [recording], each)[0], each, ()))
    found: dict[int, Any] = {}
    while len(found) < 3:
        found |= {at: outcome for at, _, outcome in slots.step() if outcome is not GOES_ON}
    assert isinstance(found[1].exception, InvalidItem)
    assert "max_new_tokens" in str(found[1].exception)
    assert [found[0]["duration_s"], found[2]["duration_s"]] == [0.7, 4.1]


def test_drawn_tokens_make_another_text(build_sound: Build) -> None:
    model = load(build_sound("whisper-en"))
    (drawn,) = transcribe(model, RECORDINGS[3:4], temperature=1.0)
    assert drawn["text"] != transcribe(model, RECORDINGS[3:4])[0]["text"]


def test_recording_has_a_maximum_length(build_sound: Build) -> None:
    settings = ModelSettings(kind="transcription", model=str(build_sound("whisper-en")))
    model = TranscriptionModel(settings, MediaSettings(max_audio_s=5))
    model.load("cpu")
    (failed,) = prepare(model, [RECORDINGS[3]], {})
    assert str(failed.exception) == "audio: is longer than media.max_audio_s = 5 seconds; cut it"


@pytest.mark.parametrize(
    ("architecture", "keywords", "problem"),
    [
        ("whisper", {"language": "tlh"}, "keyword language = 'tlh': there are de, en, fr"),
        ("whisper", {"task": "sing"}, "keyword task = 'sing'"),
        ("whisper", {"prompt": "<|en|>"}, "keyword prompt:"),
        ("whisper", {"speed": 2}, "keyword speed: no such keyword"),
        ("whisper-en", {"language": "en"}, "keywords language and task: the model knows one"),
        ("wav2vec2", {"prompt": "a word"}, "keywords: a CTC model takes timestamps alone"),
    ],
)
def test_wrong_keyword_is_named(
    build_sound: Build, architecture: str, keywords: dict[str, Any], problem: str
) -> None:
    (failed,) = prepare(load(build_sound(architecture)), RECORDINGS[:1], keywords)
    assert isinstance(failed.exception, InvalidItem)
    assert str(failed.exception).startswith(problem)


def test_whisper_that_knows_no_times_gives_none(build_sound: Build, tmp_path: Path) -> None:
    folder = tmp_path / "whisper"
    folder.mkdir()
    for file in build_sound("whisper-en").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    known = json.loads((folder / "generation_config.json").read_text())
    del known["no_timestamps_token_id"], known["alignment_heads"]
    (folder / "generation_config.json").write_text(json.dumps(known))
    model = load(folder)
    assert transcribe(model, RECORDINGS[:1])[0].keys() == {*("text", "language", "duration_s")}
    (failed,) = prepare(model, RECORDINGS[:1], {"timestamps": "word"})
    assert str(failed.exception).startswith("keyword timestamps = 'word'")


def test_model_that_hears_no_speech_is_refused(build_sound: Build) -> None:
    with pytest.raises(ModelLoadError, match="is a clap, and transcription takes Whisper"):
        load(build_sound("clap"))
    with pytest.raises(ModelLoadError, match="its checkpoint has no trained head"):
        load(build_sound("labels"))


def test_step_that_takes_long_is_followed_by_a_shorter_one(
    build_sound: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(build_sound("whisper-en"), slots=4)
    (prepared,) = prepare(model, [make_recording(32)], {})
    model.is_streamed = True
    model.join(0, prepared, ())

    def count_windows() -> int:
        (advance,) = model.step()
        return len(advance.piece["windows"])

    assert [count_windows() for _ in range(3)] == [1, 2, 4]
    monkeypatch.setattr(transcription, "MAX_STEP_S", 0.0)
    assert [count_windows() for _ in range(2)] == [4, 1]
