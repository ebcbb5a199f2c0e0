"""OpenAI's routes for speech: what a recording says, whole, as subtitles, or as a stream."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from starlette.datastructures import FormData, UploadFile
from starlette.responses import PlainTextResponse, Response

from batchery.retry import AWAY_S
from batchery_producer.gateway.answers import (
    EVENTS_CONTENT,
    EventStream,
    json_response,
    off_loop,
    write_event,
)
from batchery_producer.gateway.bodies import open_form
from batchery_producer.gateway.inference import check_all, read_timeout_s, run_outcomes
from batchery_producer.gateway.media import Loan
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import validate
from batchery_producer.gateway.routes.completions import LAST_EVENT_HEADER, PieceFeed, write_error
from batchery_producer.gateway.running import get_gateway
from batchery_producer.request_fields import Unserved, expected

router = APIRouter(tags=["openai"])

TRANSCRIPTIONS_URL, TRANSLATIONS_URL = URLS = (
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)

KINDS = ("transcription",)

#: How long Redis keeps a recording that is streamed, in seconds: if a worker dies, another one
#: reads it again.
STREAM_KEEP_S = 6 * 3600

#: The answer of a longer recording is written in a thread.
INLINE_SEGMENTS = 500

#: Formats that need to know when what was said.
TIMED = ("srt", "vtt", "verbose_json")


class TranscriptionRequest(BaseModel):
    """What OpenAI's clients send, as a form; other fields are ignored."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    file: Annotated[
        UploadFile,
        expected("a file, sent as multipart/form-data"),
        WithJsonSchema({"type": "string", "format": "binary"}),
    ]
    model: Annotated[str | None, Field(description="The first speech model if missing.")] = None
    language: Annotated[str | None, Field(max_length=100)] = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0
    timestamp_granularities: list[Literal["word", "segment"]] = []
    stream: bool = False
    include: Unserved = None
    keywords: Unserved = None
    known_speaker_names: Unserved = None
    known_speaker_references: Unserved = None
    languages: Unserved = None

    @model_validator(mode="after")
    def _fits_the_format(self) -> Self:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise ValueError("timestamp_granularities are for response_format verbose_json")
        if self.stream and self.response_format not in ("json", "text"):
            raise ValueError("a stream has response_format json")
        return self

    @classmethod
    def read(cls, form: FormData) -> Self:
        """Reads a form, in which names of lists may end in brackets.

        Raises:
            RequestValidationError: A field is missing or wrong.
        """
        fields: dict[str, Any] = {}
        for name, value in form.multi_items():
            bare = name.removesuffix("[]")
            if bare == "timestamp_granularities":
                fields.setdefault(bare, []).append(value)
            elif value != "":
                fields[bare] = value
        return validate(cls, fields)

    def build_keywords(self, task: str) -> dict[str, Any]:
        """Keywords of the job; what is a model's default anyway is not said."""
        found = {"language": self.language, "prompt": self.prompt, "temperature": self.temperature}
        keywords = {name: value for name, value in found.items() if value}
        if task != "transcribe":
            keywords["task"] = task
        if "word" in self.timestamp_granularities:
            keywords["timestamps"] = "word"
        elif self.response_format in TIMED:
            keywords["timestamps"] = "segment"
        return keywords


FORM = {"multipart/form-data": {"schema": TranscriptionRequest.model_json_schema()}}

ABOUT: dict[str, Any] = {
    "response_class": Response,
    "openapi_extra": {"requestBody": {"required": True, "content": FORM}},
    "responses": {
        200: {
            "description": "The text, in the format that was asked for; or its events.",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/plain": {"schema": {"type": "string"}},
                **EVENTS_CONTENT,
            },
        }
    },
}


@router.post(TRANSCRIPTIONS_URL, **ABOUT)
async def transcribe(request: Request) -> Response:
    """What a recording says."""
    return await _answer(request, "transcribe")


@router.post(TRANSLATIONS_URL, **ABOUT)
async def translate(request: Request) -> Response:
    """What a recording says, in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    loan, item, caller = Loan(request), None, request.state.caller
    async with open_form(request) as form:
        body = TranscriptionRequest.read(form)
        model = get_gateway(request).models.find(body.model, KINDS)
        caller.check(1, len(body.prompt or ""))
        # Who reads on sends it again, for a job that has it already.
        if LAST_EVENT_HEADER not in request.headers:
            keep_s = STREAM_KEEP_S if body.stream else read_timeout_s(request) + AWAY_S
            item = await loan.lend(body.file, keep_s)
    keywords = body.build_keywords(task)
    if body.stream:
        return await _stream(request, model, item, keywords, loan)
    try:
        call = run_outcomes(request, model, [item], keywords, per_job=1)
        (outcome,) = check_all(await call)
    finally:
        loan.end()
    is_long = len(outcome.value.get("segments", ())) > INLINE_SEGMENTS
    return await off_loop(caller, lambda: _write(body, outcome.value, task), is_long=is_long)


def _write(body: TranscriptionRequest, result: Mapping[str, Any], task: str) -> Response:
    """The answer of a request, in its format."""
    text, segments = result["text"].strip(), result.get("segments", ())
    if body.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if body.response_format == "srt":
        return PlainTextResponse(write_srt(segments))
    if body.response_format == "vtt":
        return Response(write_vtt(segments), media_type="text/vtt")
    answer = {"text": text, "usage": {"type": "duration", "seconds": result["duration_s"]}}
    if body.response_format == "verbose_json":
        answer |= {"task": task, "language": result["language"], "duration": result["duration_s"]}
        wanted = body.timestamp_granularities or ["segment"]
        if "segment" in wanted:
            answer["segments"] = [
                {"id": number, "start": each["start_s"], "end": each["end_s"], "text": each["text"]}
                for number, each in enumerate(segments)
            ]
        if "word" in wanted:
            answer["words"] = [
                {"word": each["text"].strip(), "start": each["start_s"], "end": each["end_s"]}
                for each in result["words"]
            ]
    return json_response(answer)


# Subtitles


def write_srt(segments: Sequence[Mapping[str, Any]]) -> str:
    """Segments as SubRip has them: numbered, each with its times and its text."""
    cues = _list_cues(segments, ",")
    return "".join(f"{number}\n{cue}\n" for number, cue in enumerate(cues, 1))


def write_vtt(segments: Sequence[Mapping[str, Any]]) -> str:
    """Segments as WebVTT, which browsers show with a video."""
    cues = _list_cues(segments, ".")
    return "".join(["WEBVTT\n\n", *(f"{cue}\n" for cue in cues)])


def _list_cues(segments: Sequence[Mapping[str, Any]], point: str) -> Iterator[str]:
    for each in segments:
        start, end = (_write_time(each[name], point) for name in ("start_s", "end_s"))
        # An arrow or an empty line in a text would be read as those around it.
        text = " ".join(each["text"].replace("-->", "->").split())
        yield f"{start} --> {end}\n{text}\n"


def _write_time(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    rest = f"{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest}"


# Streams


async def _stream(
    request: Request, model: ServedModel, item: Any, keywords: Mapping[str, Any], loan: Loan
) -> Response:
    try:
        feed = PieceFeed(request, model, item, keywords)
        await feed.begin()
    except BaseException:
        loan.end()
        raise

    def leave() -> None:
        feed.leave()
        loan.end()

    return EventStream(_list_events(request, feed), leave)


async def _list_events(request: Request, feed: PieceFeed) -> AsyncIterator[bytes]:
    """The events of a stream: what is new of the text, then all of it; or an error."""
    has_begun = feed.is_resumed
    try:
        async for id_, piece in feed.pieces():
            if text := piece["text"] if has_begun else piece["text"].lstrip():
                has_begun = True
                yield write_event({"type": "transcript.text.delta", "delta": text}, id_)
        text = feed.result()["text"].strip()
        if text and not has_begun:
            # Of a model that knows no times, and so no segments.
            yield write_event({"type": "transcript.text.delta", "delta": text})
        yield write_event({"type": "transcript.text.done", "text": text})
    except Exception as error:  # noqa: BLE001 - the head is sent, so it becomes an event
        yield write_error(request, error)
