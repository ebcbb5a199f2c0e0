"""The engine `openai`: slots are requests to a server, and a step collects what has arrived."""

import asyncio
import json
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import httpx2

from batchery.errors import ModelLoadError, ServerFailed
from batchery.model import GOES_ON, Advance, StepModel
from batchery.settings import ModelSettings, read_secret
from batchery_worker.models.inputs import (
    GenerationKeywords,
    check_text,
    check_token_ids,
    read_each,
    read_item,
    read_keywords,
)
from batchery_worker.models.openai_server.exchange import DISAGREES, Exchange, ServerPrompt

#: How long a step waits for something to arrive, in seconds; meanwhile no item can join.
STEP_S = 0.05

#: How long a connection may take, in seconds. Everything after that is `server_timeout_s`.
CONNECT_S = 10.0


#: The server's vocabulary is unknown: it refuses ids that are none.
ANY_VOCABULARY = 2**31


class ServerKeywords(GenerationKeywords):
    """Keywords of a job; a server refuses those that it does not know.

    Attributes:
        min_p: As vLLM has it, which OpenAI has not.
        frequency_penalty: As OpenAI has it, and so on.
        presence_penalty: The same.
        logit_bias: The same.
        response_format: The form of the answer, such as a JSON schema.
        tools: Functions that the model may call.
        tool_choice: Which of them it must call.
        extra_body: More fields of the request, which outrank all others; None leaves one out.
    """

    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    extra_body: dict[str, Any] | None = None


class OpenAIServerModel(StepModel):
    """Generates text by asking a server with OpenAI's API.

    A text goes to `/completions` as it is, messages to `/chat/completions`. Keywords of a job: see
    `ServerKeywords`.
    """

    #: The keywords that a job may have, and fields of requests unless it says something else.
    keywords: ClassVar[type[ServerKeywords]] = ServerKeywords
    defaults: ClassVar[Mapping[str, Any]] = {}

    slots = 256

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.slots = settings.slots or self.slots
        self._slots: dict[int, tuple[Exchange, Future[None]]] = {}
        self._is_closing = asyncio.Event()
        #: What exchanges delivered: themselves, a piece, an outcome or `GOES_ON`.
        self._arrived: queue.SimpleQueue[tuple[Exchange, Any, Any]] = queue.SimpleQueue()

    def load(self, device: str) -> None:  # noqa: ARG002 - none is needed
        """Starts the thread of all requests; the server may be away for now.

        Raises:
            ModelLoadError: There is no `base_url`, or the API key is none.
            SettingsError: The variable with the API key is not set.
        """
        settings = self.settings
        if settings.base_url is None:
            raise ModelLoadError(f"model {settings.model}: engine openai needs a base_url")
        key = settings.api_key_env and read_secret(settings.api_key_env)
        try:
            self._open(settings.base_url, {"authorization": f"Bearer {key}"} if key else {})
        except UnicodeEncodeError:
            raise ModelLoadError(f"{settings.api_key_env}: this API key is not ASCII") from None

    def _open(self, address: str, headers: Mapping[str, str], socket: str | None = None) -> None:
        """Starts the thread of all requests.

        Args:
            address: Where routes begin, with `/v1`.
            headers: Of each request, besides those that all have.
            socket: Path of the Unix socket where the server listens; None for the address.
        """
        # A client's log has the addresses of its requests, so a password must not be in them.
        url = httpx2.URL(address)
        own = {"content-type": "application/json", "accept-encoding": "identity"}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.slots)
        self._client = httpx2.AsyncClient(
            base_url=url.copy_with(userinfo=b""),
            auth=(url.username, url.password) if url.userinfo else None,
            headers={**own, **headers},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=limits,
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=limits) if socket else None,
        )
        began: Future[asyncio.AbstractEventLoop] = Future()
        run = partial(asyncio.run, self._hold_client(began))
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._loop = began.result()

    async def _hold_client(self, began: "Future[asyncio.AbstractEventLoop]") -> None:
        began.set_result(asyncio.get_running_loop())
        async with self._client:
            await self._is_closing.wait()

    def unload(self) -> None:
        """Cancels all requests."""
        self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
        """Makes a request of each item."""
        return read_each(items, lambda item: self._read_prompt(item, keywords))

    def _read_prompt(self, item: Any, keywords: Mapping[str, Any]) -> ServerPrompt:
        """The request for an item. Raises InvalidItem: it is none, or a keyword is wrong."""
        read, settings = read_item(item), self.settings
        if isinstance(read.prompt, list):
            check_token_ids(read.prompt, ANY_VOCABULARY, settings.max_chars)
        own = read.model_dump(include={"tools", "tool_choice", "extra_body"}, exclude_none=True)
        options = read_keywords(self.keywords, {**keywords, **own, **read.options})
        asked_for = options.model_dump(exclude={"extra_body", "max_new_tokens"}, exclude_unset=True)
        max_tokens = options.max_new_tokens or settings.max_new_tokens
        body = {
            **self.defaults,
            **asked_for,
            "max_tokens": max_tokens,
            "temperature": options.temperature,
            "stream_options": {"include_usage": True},
        }
        if read.messages and options.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": options.logprobs}
        body |= options.extra_body or {}
        body |= {"prompt": read.prompt, "messages": read.messages}
        body |= {"model": settings.model, "stream": True}
        body = {name: value for name, value in body.items() if value is not None}
        text = json.dumps(body, ensure_ascii=False)
        check_text("item", text, settings.max_chars)
        asked = (max_tokens, body.get("max_tokens"), body.get("max_completion_tokens"))
        return ServerPrompt(
            path="chat/completions" if read.messages else "completions",
            content=text.encode(),
            choices=options.n,
            max_tokens=max(each for each in asked if isinstance(each, int)) * options.n,
        )

    def join(self, slot: int, prepared: ServerPrompt, pieces: Sequence[Any], **_: Any) -> None:
        """Sends the request of an item.

        The server begins anew, but nothing is repeated: what it sends must begin with the pieces.

        Raises:
            ServerFailed: Its readers have more than texts.
        """
        if any("delta" in piece for piece in pieces):
            raise ServerFailed(f"server {self._client.base_url}: {DISAGREES}")
        sent: dict[int, str] = {}
        for piece in pieces:
            choice = piece.get("choice", 0)
            sent[choice] = sent.get(choice, "") + piece["text"]
        is_streamed = self.is_streamed or bool(pieces)
        exchange = Exchange(
            self._client, self.settings, prepared, sent if is_streamed else None, self._deliver
        )
        running = asyncio.run_coroutine_threadsafe(exchange.run(), self._loop)
        self._slots[slot] = exchange, running

    def leave(self, slot: int) -> None:
        """Cancels the request, which closes its connection."""
        self._slots.pop(slot)[1].cancel()

    def step(self) -> Sequence[Advance]:
        """Collects what has arrived, and waits for it for `STEP_S` at most."""
        arrived = []
        with suppress(queue.Empty):
            arrived.append(self._arrived.get(timeout=STEP_S))
            while True:
                arrived.append(self._arrived.get_nowait())
        slots = {exchange: slot for slot, (exchange, _) in self._slots.items()}
        # What has left may have sent something before it was cancelled.
        advances = [
            Advance(slots[exchange], *news) for exchange, *news in arrived if exchange in slots
        ]
        for slot, _, outcome in advances:
            if outcome is not GOES_ON:
                del self._slots[slot]
        # Requests have limits of their own: one that waits for long is no device that hangs.
        return advances or [Advance(slot) for slot in self._slots]

    def _deliver(self, *arrival: Any) -> None:
        self._arrived.put(arrival)
