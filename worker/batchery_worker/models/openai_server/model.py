"""The engine `openai`: slots are requests to a server, and a step collects what has arrived."""

import asyncio
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import httpx2

from batchery.errors import InvalidItem, ModelLoadError, ServerFailed
from batchery.model import GOES_ON, Advance, StepModel
from batchery.outcomes import Failed
from batchery.settings import ModelSettings, read_secret
from batchery_worker.models.openai_server.answer import DISAGREES
from batchery_worker.models.openai_server.exchange import Exchange, ModelServer, ServerPrompt
from batchery_worker.models.openai_server.prompts import ServerKeywords, read_prompt

#: How long a step waits for something to arrive, in seconds; meanwhile no item can join.
STEP_S = 0.05

#: How long a connection may take, in seconds. Everything after that is `server_timeout_s`.
CONNECT_S = 10.0


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
        client = httpx2.AsyncClient(
            base_url=url.copy_with(userinfo=b""),
            auth=(url.username, url.password) if url.userinfo else None,
            headers={**own, **headers},
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=limits,
            transport=httpx2.AsyncHTTPTransport(uds=socket, limits=limits) if socket else None,
        )
        self._server = ModelServer(client, self.settings)
        runner = asyncio.Runner()
        self._loop = runner.get_loop()
        self._thread = threading.Thread(target=self._run_requests, args=(runner,), daemon=True)
        self._thread.start()

    def _run_requests(self, runner: asyncio.Runner) -> None:
        with runner:
            runner.run(self._hold_client())

    async def _hold_client(self) -> None:
        async with self._server.client:
            await self._is_closing.wait()

    def unload(self) -> None:
        """Cancels all requests."""
        self._loop.call_soon_threadsafe(self._is_closing.set)
        self._thread.join()

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
        """Makes a request of each item."""
        return [self._prepare(item, keywords) for item in items]

    def _prepare(self, item: Any, keywords: dict[str, Any]) -> ServerPrompt | Failed:
        try:
            return read_prompt(item, keywords, self.settings, self.keywords, self.defaults)
        except InvalidItem as error:
            return Failed(error)

    def join(self, slot: int, prepared: ServerPrompt, pieces: Sequence[Any], **_: Any) -> None:
        """Sends the request of an item.

        The server begins anew, but nothing is repeated: what it sends must begin with the pieces.

        Raises:
            ServerFailed: Its readers have more than texts.
        """
        if any("delta" in piece for piece in pieces):
            raise ServerFailed(f"server {self._server.client.base_url}: {DISAGREES}")
        sent: dict[int, str] = {}
        for piece in pieces:
            choice = piece.get("choice", 0)
            sent[choice] = sent.get(choice, "") + piece["text"]
        is_streamed = self.is_streamed or bool(pieces)
        exchange = Exchange(self._server, prepared, sent if is_streamed else None, self._deliver)
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
