"""One item on its way through a server: request, stream, and another attempt where that helps."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2

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
from batchery_worker.models.openai_server.answer import ServerAnswer

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


class ModelServer(NamedTuple):
    """A server, as all exchanges with it see it."""

    client: httpx2.AsyncClient
    settings: ModelSettings


class TryAgain(Exception):
    """The server failed in a way that may pass."""

    def __init__(self, reason: str, status: Any = None, after_s: float = 0.0) -> None:
        """Takes a text, a status, and for how many seconds the server asks not to come again."""
        super().__init__(reason)
        self.after_s = after_s
        #: The error if it does not pass.
        self.lasting = ServerBusy if status == 429 else ServerFailed


class Exchange:
    """What happens to one item; all of it on the event loop."""

    def __init__(
        self,
        server: ModelServer,
        prompt: ServerPrompt,
        sent: Mapping[int, str] | None,
        deliver: Callable[["Exchange", Any, Any], None],
    ) -> None:
        """Prepares.

        Args:
            server: Where to send it.
            prompt: The item.
            sent: The texts that readers have of each answer already; None if nobody streams.
            deliver: Called with self, a piece, and an outcome or `GOES_ON`.
        """
        self._server = server
        self._prompt = prompt
        self._is_streamed = sent is not None
        self._sent = sent or {}
        self._deliver = deliver
        self._began_s = time.monotonic()
        self._first_s: float | None = None
        self._has_ended = False

    async def run(self) -> None:
        """Delivers pieces, and the outcome at last; raises nothing but a cancellation."""
        try:
            await self._run()
        except ServerFailed as error:
            name = self._server.client.base_url
            self._end(Failed(type(error)(f"server {name}: {error}")))
        except Exception as error:  # noqa: BLE001 - whatever it is, this job ends with it, alone
            self._end(Failed(error))

    async def _run(self) -> None:
        """Makes attempts until one succeeds, or there is no time for another."""
        limit_s = self._server.settings.server_retry_s
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
        max_chars = max(MIN_MAX_CHARS, self._prompt.max_tokens * MAX_CHARS_PER_TOKEN)
        answer = ServerAnswer(self._prompt.choices, max_chars, self._sent)
        failure = TryAgain("its stream ended before the answer did")
        try:
            await self._stream(answer)
        except TryAgain as error:
            failure = error
        except TimeoutError:
            timeout_s = self._server.settings.server_timeout_s
            failure = TryAgain(f"it sent nothing new for {timeout_s:g} s")
        except httpx2.SSEError as error:
            raise ServerFailed(f"it sent no stream of events: {error}") from None
        except httpx2.RequestError as error:
            failure = TryAgain(str(error) or type(error).__name__)
        # Only the end of the stream may be missing.
        if answer.is_complete:
            return self._complete(answer)
        if self._is_streamed:
            self._sent = answer.read_sent()
        raise failure

    async def _stream(self, answer: ServerAnswer) -> None:
        """Reads one stream into an answer."""
        timeout_s, prompt = self._server.settings.server_timeout_s, self._prompt
        request = self._server.client.stream("POST", prompt.path, content=prompt.content)
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
        for piece in pieces if self._is_streamed else ():
            self._deliver(self, piece, GOES_ON)
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
            self._deliver(self, None, outcome)


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
