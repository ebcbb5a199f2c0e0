"""OpenAI's routes for speech: what a recording says, whole, as subtitles, or as a stream."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema
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
from batchery_producer.request_fields import expected

router = APIRouter(tags=["openai"])

#: The second one is for translations.
URLS = "/v1/audio/transcriptions", "/v1/audio/translations"

KINDS = ("transcription",)

#: How long Redis keeps a recording that is streamed, in seconds: if a worker dies, another one
#: reads it again.
STREAM_KEEP_S = 6 * 3600

#: The answer of a longer recording is written in a thread.
INLINE_SEGMENTS = 500


class TranscriptionRequest(BaseModel):
    """What OpenAI's clients send, as a form."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    file: Annotated[
        UploadFile,
        expected("a file, sent as multipart/form-data"),
        WithJsonSchema({"type": "string", "format": "binary"}),
    ]
    model: Annotated[str | None, Field(description="The first speech model if missing.")] = None
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0
    timestamp_granularities: list[Literal["word", "segment"]] = ["segment"]
    stream: Annotated[bool, Field(description="Answer with events, whatever the format.")] = False
    chunking_strategy: Annotated[str | None, Field(description="Ignored.")] = None

    @classmethod
    def read(cls, form: FormData) -> Self:
        """Reads a form, in which names of lists may end in brackets.

        Raises:
            RequestValidationError: A field is missing, wrong or unknown.
        """
        fields: dict[str, Any] = {}
        for name, value in form.multi_items():
            if (bare := name.removesuffix("[]")) == "timestamp_granularities":
                fields.setdefault(bare, []).append(value)
            elif value != "":
                fields[bare] = value
        return validate(cls, fields)

    def build_keywords(self, task: str) -> dict[str, Any]:
        """Keywords of the job; what is a model's default anyway is not said."""
        found: dict[str, Any] = self.model_dump(include={"language", "prompt", "temperature"})
        if task == "translate":
            found["task"] = task
        if self.response_format in ("srt", "vtt", "verbose_json"):
            found["timestamps"] = "word" if "word" in self.timestamp_granularities else "segment"
        return {name: value for name, value in found.items() if value}


FORM = {"multipart/form-data": {"schema": TranscriptionRequest.model_json_schema()}}
ABOUT: dict[str, Any] = {
    "response_class": PlainTextResponse,
    "responses": {200: {"content": {"application/json": {}, "text/vtt": {}, **EVENTS_CONTENT}}},
    "openapi_extra": {"requestBody": {"required": True, "content": FORM}},
}


@router.post(URLS[0], **ABOUT)
@router.post(URLS[1], **ABOUT)
async def transcribe(request: Request) -> Response:
    """What a recording says: in its language, or of translations in English."""
    task = "translate" if request.url.path == URLS[1] else "transcribe"
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
    form, text, duration_s = body.response_format, result["text"].strip(), result["duration_s"]
    if form == "text":
        return PlainTextResponse(f"{text}\n")
    if form in ("srt", "vtt"):
        content = write_subtitles(result["segments"], is_vtt=form == "vtt")
        return Response(content, media_type="text/vtt" if form == "vtt" else "text/plain")
    answer = {"text": text, "usage": {"type": "duration", "seconds": duration_s}}
    if form == "verbose_json":
        answer |= {"task": task, "language": result["language"], "duration": duration_s}
        parts = {
            name: [
                {"start": each["start_s"], "end": each["end_s"], "text": each["text"]}
                for each in result.get(f"{name}s") or ()
            ]
            for name in body.timestamp_granularities
        }
        if "segment" in parts:
            answer["segments"] = [{"id": id_, **each} for id_, each in enumerate(parts["segment"])]
        if "word" in parts:
            answer["words"] = [{"word": each.pop("text").strip(), **each} for each in parts["word"]]
    return json_response(answer)


def write_subtitles(segments: Sequence[Mapping[str, Any]], *, is_vtt: bool) -> str:
    """Segments as WebVTT, which browsers show with a video, or as SubRip has them.

    Args:
        segments: Each with `start_s`, `end_s` and `text`.
        is_vtt: Whether it is WebVTT.
    """
    blocks, point = (["WEBVTT\n"], ".") if is_vtt else ([], ",")
    for number, each in enumerate(segments, 1):
        start, end = (_write_time(each[name], point) for name in ("start_s", "end_s"))
        # An arrow or an empty line in a text would be read as those around it.
        text = " ".join(each["text"].replace("-->", "->").split())
        blocks.append(f"{number}\n{start} --> {end}\n{text}\n")
    return "\n".join(blocks)


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
