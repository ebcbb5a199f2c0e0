"""One item on its way through a server: request, events, and another attempt where that helps."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2
from pydantic import BaseModel, Field, ValidationError

from batchery.errors import (
    InvalidItem,
    PromptTooLong,
    ServerBusy,
    ServerFailed,
    ServerRefused,
    counted,
)
from batchery.model import GOES_ON
from batchery.outcomes import Failed
from batchery.settings import ModelSettings

#: Statuses below 500 that say "not now", and those above that say "never".
NOT_NOW, NEVER = (408, 409, 425, 429), (501, 505)

#: Statuses that refuse the item, not its sender.
UNFIT = (400, 413, 422)

#: What to do about others that another attempt does not change.
ADVICE = {401: "; check api_key_env", 403: "; check api_key_env", 404: "; check base_url and model"}

#: First and longest pause before another attempt, in seconds, if the server asks for none.
FIRST_SERVER_PAUSE_S, MAX_SERVER_PAUSE_S = 0.5, 30.0

#: Maximum bytes of one event, and of what is read and quoted of an error.
MAX_EVENT_BYTES, MAX_ERROR_BYTES, MAX_ERROR_CHARS = 1 << 20, 1 << 16, 400

#: Maximum characters of all events for each token that was asked for, and at least so many. The
#: JSON around a token has hundreds, with log probabilities thousands.
MAX_CHARS_PER_TOKEN, MIN_MAX_CHARS = 1 << 12, 1 << 20

#: How long the end of a stream may take after its last event, in seconds; then the connection is
#: closed instead of used again.
DRAIN_S = 1.0


class ServerPrompt(NamedTuple):
    """An item as a server takes it."""

    path: str
    #: JSON.
    content: bytes
    #: Number of answers, and maximum tokens of all of them.
    choices: int
    max_tokens: int


class TryAgain(Exception):
    """The server failed in a way that may pass."""

    def __init__(self, reason: str, status: Any = None, after_s: float = 0.0) -> None:
        """Takes a text, a status, and for how many seconds the server asks not to come again."""
        super().__init__(reason)
        self.after_s = after_s
        #: The error if it does not pass.
        self.lasting = ServerBusy if status == 429 else ServerFailed


# What the server sends, put together: pieces as they come, and the result


#: Fields of a message that come bit by bit; all others come whole.
GROWING = ("arguments", "reasoning", "reasoning_content", "refusal")


class ChoiceEvent(BaseModel):
    """What an event adds to one of the answers: to a message in a chat, else to a text."""

    index: int = Field(0, ge=0)
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class TokenCounts(BaseModel):
    """Tokens as the server counts them."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(0, ge=0)


class StreamEvent(BaseModel):
    """One event of a stream."""

    choices: list[ChoiceEvent] = []
    usage: TokenCounts | None = None
    error: Any = None


#: A second stream does not go on from what readers have of the first.
DISAGREES = (
    "its stream was cut, and another one does not go on from what readers have; run the job again"
)


class ServerChoice:
    """One of the answers to an item, so far.

    Attributes:
        text: Its text.
        sent: The text that readers have of it, perhaps from an earlier stream.
        finish_reason: Why it has ended; None while it has not.
    """

    def __init__(self, sent: str) -> None:
        self.sent = sent
        self.finish_reason: str | None = None
        self.text = ""
        self._message: dict[str, Any] = {}
        self._calls: dict[Any, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []

    def add(self, event: ChoiceEvent) -> dict[str, Any]:
        """Adds an event; returns the piece for readers, empty if it has nothing new for them.

        Raises:
            ServerFailed: The text is not what readers have.
        """
        parts = event.delta or {}
        text = (event.text or "") + (parts.get("content") or "")
        fresh = text[max(0, len(self.sent) - len(self.text)) :]
        self.text += text
        if not self.text.startswith(self.sent) and not self.sent.startswith(self.text):
            raise ServerFailed(DISAGREES)
        self.sent = max(self.sent, self.text, key=len)
        delta = {
            name: value
            for name, value in parts.items()
            if value and name not in ("role", "content")
        }
        for call in delta.get("tool_calls", ()):
            # Some servers send whole calls without an index, which OpenAI's clients need.
            if call.get("index") is None:
                call["index"] = len(self._calls)
            merge(self._calls.setdefault(call["index"], {}), call)
        merge(self._message, delta)
        self.finish_reason = event.finish_reason or self.finish_reason
        logprobs = list(read_logprobs(event.logprobs or {}))
        self._logprobs += logprobs
        new = {"text": fresh, "delta": delta, "logprobs": logprobs if fresh == text else None}
        piece = {name: value for name, value in new.items() if value}
        return {"text": "", **piece} if piece else piece

    def result(self) -> dict[str, Any]:
        """The whole answer. Raises ServerFailed: it ends before what readers have."""
        if self.text != self.sent:
            raise ServerFailed(DISAGREES)
        result: dict[str, Any] = {"text": self.text, "finish_reason": self.finish_reason}
        for call in self._calls.values():
            call.pop("index", None)
        if self._calls:
            self._message["tool_calls"] = list(self._calls.values())
        if self._message:
            content = self.text or None
            result["message"] = {"role": "assistant", "content": content, **self._message}
        return result | ({"logprobs": self._logprobs} if self._logprobs else {})


class ServerAnswer:
    """The answers to one item, so far.

    Attributes:
        usage: Tokens; None until the server reports them.
    """

    def __init__(self, choices: int, max_chars: int, sent: Mapping[int, str]) -> None:
        """Starts with nothing.

        Args:
            choices: Number of answers that were asked for.
            max_chars: Maximum length of all events; more are those of a server that never ends.
            sent: The texts that readers have of each answer, from an earlier stream.
        """
        self._choices = [ServerChoice(sent.get(index, "")) for index in range(choices)]
        self._left_chars = self._max_chars = max_chars
        self.usage: TokenCounts | None = None
        self._has_deltas = False

    @property
    def is_complete(self) -> bool:
        """Whether the server has said of all answers why they end."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def chars(self) -> int:
        """Length of all texts so far."""
        return sum(len(choice.text) for choice in self._choices)

    def read_sent(self) -> dict[int, str]:
        """The texts that readers have by now. Raises ServerFailed: they have more than texts."""
        if self._has_deltas:
            raise ServerFailed(DISAGREES)
        return {index: choice.sent for index, choice in enumerate(self._choices)}

    def add(self, data: str) -> tuple[list[dict[str, Any]], Any]:
        """Adds an event; returns the pieces for readers, and an error that the server reports.

        Raises:
            ServerFailed: It is no event of a completion, there is no end of them, or the text is
                not what readers have.
        """
        self._left_chars -= len(data)
        if self._left_chars < 0:
            raise ServerFailed(
                f"it goes on after {self._max_chars} characters; see whether it heeds max_tokens"
            )
        try:
            event = StreamEvent.model_validate_json(data)
            added = [(self._choices[each.index].add(each), each.index) for each in event.choices]
        except (ValidationError, AttributeError, IndexError, KeyError, TypeError):
            raise ServerFailed(
                f"it sent an event that is none of a completion: {data:.200}"
            ) from None
        self.usage = event.usage or self.usage
        is_one = len(self._choices) == 1
        pieces = [piece if is_one else {**piece, "choice": at} for piece, at in added if piece]
        if not is_one:
            pieces += [
                {"text": "", "choice": each.index, "finish_reason": each.finish_reason}
                for each in event.choices
                if each.finish_reason
            ]
        self._has_deltas |= any("delta" in piece for piece in pieces)
        return pieces, event.error

    def result(self, first_s: float, total_s: float) -> dict[str, Any]:
        """The result of the job, as the kind `generation` has it.

        Raises:
            ServerFailed: One of the texts ends before what readers have.
        """
        results = [choice.result() for choice in self._choices]
        tokens_in = self.usage and self.usage.prompt_tokens
        tokens_out = self.usage and self.usage.completion_tokens
        per_s = tokens_out and round(tokens_out / max(total_s - first_s, 1e-3), 1)
        timings = {"first_token_ms": first_s * 1e3, "total_ms": total_s * 1e3}
        return {
            **({"choices": results} if results[1:] else results[0]),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "timings": {**{k: round(v, 1) for k, v in timings.items()}, "tokens_per_s": per_s},
        }


def merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Adds what an event has to what earlier ones had."""
    for key, value in delta.items():
        if isinstance(value, dict):
            merge(known.setdefault(key, {}), value)
        elif value is not None:
            known[key] = known.get(key, "") + value if key in GROWING else value


def read_logprobs(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Log probabilities as the kind `generation` has them, of a chat or of a completion."""
    for each in found.get("content") or ():
        others = each.get("top_logprobs") or []
        top = [[other["token"], None, other["logprob"]] for other in others]
        read = {"token": each["token"], "id": None, "logprob": each["logprob"], "top": top}
        known = [one.get("bytes") for one in (each, *others)]
        yield {**read, "bytes": known} if any(known) else read
    tokens = found.get("tokens") or ()
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    for token, logprob, others in zip(
        tokens, found.get("token_logprobs") or (), tops, strict=False
    ):
        top = [[other, None, number] for other, number in (others or {}).items()]
        yield {"token": token, "id": None, "logprob": logprob, "top": top}


# The way of an item


@dataclass(eq=False)
class Exchange:
    """What happens to one item; all of it on the event loop.

    Attributes:
        client: Of the server.
        settings: The model's.
        prompt: The item.
        sent: The texts that readers have of each answer already; None if nobody streams.
        deliver: Called with self, a piece, and an outcome or `GOES_ON`.
    """

    client: httpx2.AsyncClient
    settings: ModelSettings
    prompt: ServerPrompt
    sent: Mapping[int, str] | None
    deliver: Callable[["Exchange", Any, Any], None]
    _began_s: float = field(default_factory=time.monotonic)
    _first_s: float | None = None
    _has_ended: bool = False

    async def run(self) -> None:
        """Delivers pieces, and the outcome at last; raises nothing but a cancellation."""
        try:
            await self._run()
        except ServerFailed as error:
            name = self.client.base_url
            self._end(Failed(type(error)(f"server {name}: {error}")))
        except Exception as error:  # noqa: BLE001 - whatever it is, this job ends with it, alone
            self._end(Failed(error))

    async def _run(self) -> None:
        """Makes attempts until one succeeds, or there is no time for another."""
        limit_s = self.settings.server_retry_s
        failures, ends_s = 0, math.inf
        while not self._has_ended:
            try:
                await self._ask()
            except (TryAgain, OSError) as error:
                failures += 1
                ends_s = min(ends_s, time.monotonic() + limit_s)
                pause = pause_s(failures, getattr(error, "after_s", 0.0))
                if time.monotonic() + pause > ends_s:
                    raise getattr(error, "lasting", ServerFailed)(
                        f"{error}; gave up after {counted(failures, 'attempt')}, as"
                        f" server_retry_s = {limit_s:g}"
                    ) from None
                await asyncio.sleep(pause)

    async def _ask(self) -> None:
        """Makes an attempt. Raises TryAgain: another one may succeed."""
        max_chars = max(MIN_MAX_CHARS, self.prompt.max_tokens * MAX_CHARS_PER_TOKEN)
        answer = ServerAnswer(self.prompt.choices, max_chars, self.sent or {})
        failure = TryAgain("its stream ended before the answer did")
        try:
            await self._stream(answer)
        except TryAgain as error:
            failure = error
        except TimeoutError:
            timeout_s = self.settings.server_timeout_s
            failure = TryAgain(f"it sent nothing new for {timeout_s:g} s")
        except httpx2.SSEError as error:
            raise ServerFailed(f"it sent no stream of events: {error}") from None
        except httpx2.RequestError as error:
            failure = TryAgain(str(error) or type(error).__name__)
        # Only the end of the stream may be missing.
        if answer.is_complete:
            return self._complete(answer)
        if self.sent is not None:
            self.sent = answer.read_sent()
        raise failure

    async def _stream(self, answer: ServerAnswer) -> None:
        """Reads one stream into an answer."""
        timeout_s, prompt = self.settings.server_timeout_s, self.prompt
        request = self.client.stream("POST", prompt.path, content=prompt.content)
        async with asyncio.timeout(timeout_s) as patience, request as response:
            if response.status_code != 200:
                raise await read_refusal(response)
            async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
                # One that has no data, but a time for retries, say, is none to the standard.
                if self._has_ended or not event.data:
                    continue
                now_s = asyncio.get_running_loop().time()
                if event.data == "[DONE]":
                    if not answer.is_complete:
                        raise ServerFailed("it ended its stream without a finish_reason")
                    self._complete(answer)
                    patience.reschedule(now_s + DRAIN_S)
                elif self._take(answer, event.data):
                    patience.reschedule(now_s + timeout_s)

    def _take(self, answer: ServerAnswer, data: str) -> bool:
        """Takes an event; returns whether it had something new, for readers or for the answer."""
        chars = answer.chars
        pieces, error = answer.add(data)
        for piece in pieces if self.sent is not None else ():
            self.deliver(self, piece, GOES_ON)
        self._first_s = self._first_s or (time.monotonic() if pieces else None)
        has_news = bool(pieces) or answer.chars > chars
        if error is not None:
            reason, code = read_reason(error)
            text = f"it broke off: {reason[:MAX_ERROR_CHARS]}"
            if code in UNFIT:
                raise InvalidItem(f"the server refuses the item: {text}")
            if isinstance(code, int) and is_lasting(code):
                raise ServerRefused(text)
            raise TryAgain(text, code)
        return has_news

    def _complete(self, answer: ServerAnswer) -> None:
        if self._has_ended:
            return
        now_s = time.monotonic()
        self._end(answer.result((self._first_s or now_s) - self._began_s, now_s - self._began_s))

    def _end(self, outcome: Any) -> None:
        if not self._has_ended:
            self._has_ended = True
            self.deliver(self, None, outcome)


def pause_s(failures: int, after_s: float) -> float:
    """Pause before the next attempt, in seconds.

    It is drawn, because requests that failed together must not come back together.

    Args:
        failures: How many attempts have failed, 1 or more.
        after_s: For how long the server asks.
    """
    longest_s = min(FIRST_SERVER_PAUSE_S * 2.0 ** min(failures - 1, 10), MAX_SERVER_PAUSE_S)
    return max(random.uniform(longest_s / 2, longest_s), after_s * random.uniform(1.0, 1.1))


def is_lasting(status: int) -> bool:
    """Whether another attempt would get the same status."""
    return status in NEVER or (status < 500 and status not in NOT_NOW)


async def read_refusal(response: httpx2.Response) -> Exception:
    """What a response with a status other than 200 means."""
    body, status = b"", response.status_code
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ERROR_BYTES:
            break
    try:
        reason, code = read_reason(json.loads(body))
    except (ValueError, RecursionError):
        reason, code = body.decode(errors="replace"), None
    text = f"it answered {status}: {reason[:MAX_ERROR_CHARS]}{ADVICE.get(status, '')}"
    if status in UNFIT:
        is_too_long = code == "context_length_exceeded" or "maximum context length" in reason
        kind = PromptTooLong if is_too_long else InvalidItem
        return kind(f"the server refuses the item: {text}")
    # Money does not come back within minutes.
    if is_lasting(status) or code == "insufficient_quota":
        return ServerRefused(text)
    after_s = read_retry_after(response.headers.get("retry-after", ""))
    asked = f" (it asks for a pause of {after_s:g} s)" if after_s else ""
    return TryAgain(text + asked, status, after_s)


def read_reason(body: Any) -> tuple[str, Any]:
    """Text and code of an error, as OpenAI, vLLM or FastAPI write it; the text on one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    is_known = isinstance(error, dict)
    text = (error.get("message") or error.get("detail") or error) if is_known else error
    return " ".join(str(text).split()), error.get("code") if is_known else None


def read_retry_after(text: str) -> float:
    """For how many seconds a server asks not to come again; 0 if it does not."""
    with suppress(ValueError):
        return max(0.0, float(text))
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0
