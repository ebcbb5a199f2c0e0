"""A real HTTP server with OpenAI's API that misbehaves as a test asks."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

EVENTS = "text/event-stream"


class Asked(NamedTuple):
    """A request that came."""

    at_s: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def prompt(self) -> str:
        messages = self.body.get("messages")
        return str(messages[-1]["content"] if messages else self.body["prompt"])


class Call:
    """One request, as a reply sees it."""

    def __init__(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.asked, self.reader, self._writer = asked, reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: int = 200, content_type: str = EVENTS, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        lines += ["transfer-encoding: chunked", "", ""]
        await self.send("\r\n".join(lines).encode())

    async def part(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, content: Any) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        await self.part(f"data: {text}\n\n".encode())

    async def words(self, text: str, finish: str | None = "stop", choice: int = 0) -> None:
        """A text in words, and why it ends."""
        is_chat = "chat" in self.asked.path
        for word in text.split(" "):
            text = word + " "
            new = {"delta": {"content": text}} if is_chat else {"text": text}
            await self.event({"choices": [{"index": choice, "finish_reason": None, **new}]})
        if finish:
            end = {"index": choice, "finish_reason": finish}
            await self.event({"choices": [end | ({} if is_chat else {"text": ""})]})

    async def done(self, tokens_in: int = 3, tokens_out: int = 2) -> None:
        usage = {"prompt_tokens": tokens_in, "completion_tokens": tokens_out}
        await self.event({"choices": [], "usage": usage})
        await self.event("[DONE]")
        await self.part(b"")


Reply = Callable[[Call], Awaitable[None]]


class Cut(Exception):
    """A reply raises it to close the connection."""


async def echo(call: Call) -> None:
    """What a prompt gets for which there is nothing else."""
    await call.head()
    for choice in range(call.asked.body.get("n", 1)):
        await call.words(call.asked.prompt.upper(), choice=choice)
    await call.done()


def status(number: int, message: str = "no", code: str | None = None, **headers: str) -> Reply:
    async def reply(call: Call) -> None:
        await call.head(number, "application/json", **headers)
        await call.part(json.dumps({"error": {"message": message, "code": code}}).encode())
        await call.part(b"")

    return reply


def raw(*events: Any, content_type: str = EVENTS, then: Reply | None = None) -> Reply:
    """Events as they are; then the connection is cut, unless there is more."""

    async def reply(call: Call) -> None:
        await call.head(content_type=content_type)
        for event in events:
            await call.event(event)
        if then is None:
            raise Cut
        await then(call)

    return reply


def cut_after(text: str) -> Reply:
    async def reply(call: Call) -> None:
        await call.head()
        await call.words(text, finish=None)
        raise Cut

    return reply


def pause_after(text: str, seconds: float) -> Reply:
    """Says a part, and then nothing for a while."""

    async def reply(call: Call) -> None:
        await call.head()
        await call.words(text, finish=None)
        await asyncio.sleep(seconds)
        await call.words("late")
        await call.done()

    return reply


class OpenAIServer:
    """Listens on loopback."""

    def __init__(self) -> None:
        #: What prompts get, each in turn; the last one again and again.
        self.replies: dict[str, list[Reply]] = {}
        self.asked: list[Asked] = []
        #: Connections that were made, and requests that run; and the most that ran at once.
        self.connections = self.running = self.most_running = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[Any] = set()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def count(self, prompt: str) -> int:
        """How often a prompt came."""
        return sum(asked.prompt == prompt for asked in self.asked)

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        self.connections += 1
        try:
            with suppress(EOFError, ConnectionError, asyncio.CancelledError, Cut):
                while True:
                    await self._answer(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        asked = Asked(time.monotonic(), head[0].split(" ")[1], headers, body)
        self.asked.append(asked)
        replies = self.replies.get(asked.prompt) or [echo]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._reply(reply(Call(asked, reader, writer)), reader)
        finally:
            self.running -= 1

    async def _reply(self, replying: Awaitable[None], reader: asyncio.StreamReader) -> None:
        """Runs a reply until it ends, or the caller hangs up."""
        reply = asyncio.ensure_future(replying)
        gone = asyncio.ensure_future(_wait_gone(reader))
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
            if not reply.done():
                raise Cut
            reply.result()
        finally:
            for task in (reply, gone):
                task.cancel()
            await asyncio.gather(reply, gone, return_exceptions=True)


async def _wait_gone(reader: asyncio.StreamReader) -> None:
    # A caller sends nothing before it has the answer.
    while not reader.at_eof():
        await asyncio.sleep(0.02)
