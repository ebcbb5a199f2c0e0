"""A closed loop of HTTP connections, in a process of its own: each sends when it has its answer.

Bodies are made beforehand, and answers are read after the clock has stopped, so that the client
costs little beside the server.
"""

import argparse
import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httptools
import numpy as np
import psutil
import uvloop

from benchmarks.engine.sample import cpu_by_name, cpu_since
from benchmarks.peers.text_peer import serve

HOST = "127.0.0.1"

#: Cosine of a vector and the right one; less is a wrong answer.
ALIKE = 0.999

#: How long all connections may take to be there, in seconds.
CONNECT_S = 60.0


class Connection(asyncio.Protocol):
    """One connection: the next request goes when the answer to the last one is complete."""

    def __init__(self, load: "Load", number: int) -> None:
        self._load = load
        self._number = number
        self._parser: Any = None
        self._parts: list[bytes] = []
        self._sent_s = 0.0
        self._transport: Any = None
        self.is_open = False
        self._is_running = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for the start."""
        self._transport = transport
        self.is_open = True

    def connection_lost(self, _: Exception | None) -> None:
        """The server has closed it, which it should not."""
        if self.is_open:
            self.is_open = False
            self._load.lost += 1
            self._leave()

    def start(self) -> None:
        """Sends the first request."""
        self._is_running = True
        self.send()

    def send(self) -> None:
        """Sends the next request, unless the time is over, or nobody is there any more."""
        self._sent_s = time.perf_counter()
        if not self.is_open or self._sent_s >= self._load.end_s:
            self._leave()
            return
        self._number = (self._number + 1) % len(self._load.requests)
        self._parts.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(self._load.requests[self._number])

    def data_received(self, data: bytes) -> None:
        """Reads on."""
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Keeps a part of the answer."""
        self._parts.append(body)

    def on_message_complete(self) -> None:
        """Notes the answer."""
        took_s = time.perf_counter() - self._sent_s
        status = self._parser.get_status_code()
        self._load.answered(self._number, status, took_s, b"".join(self._parts))
        # Not at once: the parser is not done with this answer.
        asyncio.get_running_loop().call_soon(self.send)

    def _leave(self) -> None:
        if self._is_running:
            self._is_running = False
            self._load.leave()

    def close(self) -> None:
        """Ends the connection."""
        self.is_open = False
        self._transport.close()


class Load:
    """All connections of one run."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self.requests = requests
        self._port = port
        self.end_s = 0.0
        self.lost = 0
        self._running = 0
        self._latencies_s: list[float] = []
        self._statuses: dict[int, int] = {}
        #: The last answer to each request.
        self.bodies: dict[int, bytes] = {}
        self._done: asyncio.Event | None = None

    async def run(self, connections: int, seconds: float) -> dict[str, Any]:
        """Runs for so long; returns the figures.

        Raises:
            ConnectionError: There was no answer at all.
        """
        loop = asyncio.get_running_loop()
        opened: list[Connection] = []
        async with asyncio.timeout(CONNECT_S):
            for number in range(connections):
                make = partial(Connection, self, number * 7)
                _, each = await loop.create_connection(make, HOST, self._port)
                opened.append(each)
        began_s = time.perf_counter()
        self.end_s = began_s + seconds
        self._running, self._done = len(opened), asyncio.Event()
        for each in opened:
            each.start()
        await self._done.wait()
        took_s = time.perf_counter() - began_s
        for each in opened:
            each.close()
        if not self._latencies_s:
            raise ConnectionError(
                f"none of {connections} connections had an answer: {self._statuses}"
            )
        times = np.array(self._latencies_s) * 1e3
        return {
            "requests": len(times),
            "seconds": took_s,
            "requests_per_s": len(times) / took_s,
            "p50_ms": float(np.percentile(times, 50)),
            "p99_ms": float(np.percentile(times, 99)),
            "statuses": self._statuses,
            "refused": sum(self._statuses.values()) - len(times),
            "lost": self.lost,
        }

    def answered(self, number: int, status: int, took_s: float, body: bytes) -> None:
        """Notes an answer; one that is no vector counts as none, however quickly it came."""
        self._statuses[status] = self._statuses.get(status, 0) + 1
        if status == HTTPStatus.OK:
            self._latencies_s.append(took_s)
            self.bodies[number] = body

    def leave(self) -> None:
        """A connection has sent its last request."""
        self._running -= 1
        if not self._running and self._done is not None:
            self._done.set()


def request_of(path: str, texts: Sequence[str]) -> bytes:
    """The bytes of a request."""
    body = json.dumps({"model": "embed", "input": list(texts), "encoding_format": "base64"})
    content = body.encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def wrong(bodies: Mapping[int, bytes], right: Any, per_request: int) -> int:
    """How many of the texts have another vector than the right one."""
    count = 0
    for number, body in bodies.items():
        try:
            data = json.loads(body)["data"]
        except (ValueError, KeyError):
            count += per_request
            continue
        for place, each in enumerate(data):
            vector = np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4")
            expected = right[(number * per_request + place) % len(right)]
            cosine = vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected)
            count += not cosine > ALIKE
        count += per_request - len(data)
    return count


def main() -> None:
    """Makes one run for each line of its input."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--texts", "--vectors", "--max-tokens"):
        parser.add_argument(name)
    options = parser.parse_args()
    texts = json.loads(Path(options.texts).read_text(encoding="utf-8"))
    right = np.load(options.vectors)

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        size, doubled = asked["per_request"], [*texts, *texts]
        starts = range(0, len(texts), size)
        requests = [request_of(asked["path"], doubled[start : start + size]) for start in starts]
        watched = {name: psutil.Process(pid) for name, pid in asked["pids"].items()}
        load, before = Load(asked["port"], requests), cpu_by_name(watched)
        figures: dict[str, Any] = uvloop.run(load.run(asked["connections"], asked["seconds"]))
        used = cpu_since(before, watched)
        figures["wrong"] = wrong(load.bodies, right, size)
        figures["cpu_us_per_request"] = {
            name: seconds / max(1, figures["requests"]) * 1e6 for name, seconds in used.items()
        }
        return figures

    serve(answer)


if __name__ == "__main__":
    main()
