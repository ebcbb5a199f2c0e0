"""Thousands of slow, broken and hanging connections, and what callers notice of them.

    python -m benchmarks.http.attack --connections 10000 --seconds 60

Bad connections are opened again when the gateway closes them. Meanwhile good ones go on in a closed
loop; their rate and p99 are told before, during and after, with the gateway's memory and files.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import uvloop

from batchery_producer.gateway.server import allow_many_files
from benchmarks.engine.models import model_folder
from benchmarks.hardware import command, hardware, write_report
from benchmarks.http.load import HOST, Load, request_of
from benchmarks.http.servers import Batchery

#: Good connections.
CALLERS = 20

#: Seconds between two bytes of a slow one.
DRIP_S = 3.0

#: How long one hangs that has asked, in seconds: these cost a forward pass each.
HANG_S = 30.0

#: Pause before a connection that was closed is opened again, in seconds.
AGAIN_S = 1.0

#: Measurements: before, several during, and after.
PHASES = 6

GOOD = request_of("/v1/embeddings", ["a text"])
HEAD = GOOD.partition(b"\r\n\r\n")[0]

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def idle(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Sends nothing."""
    await reader.read()


async def slow_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends its head byte by byte."""
    await drip(writer, HEAD)


async def slow_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends its body byte by byte."""
    writer.write(HEAD + b"\r\n\r\n")
    await drip(writer, b" " * 1000)


async def endless_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends headers without end."""
    writer.write(HEAD)
    for number in range(100_000):
        writer.write(b"\r\nX-%d: %s" % (number, b"x" * 1000))
        await writer.drain()
        await asyncio.sleep(0.1)


async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends what is no HTTP."""
    writer.write(random.randbytes(2000))
    await reader.read()


async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Breaks off in the middle of a body."""
    writer.write(HEAD + b"\r\n\r\n{")
    await writer.drain()
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await asyncio.sleep(DRIP_S)


async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks, and reads no answer."""
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(GOOD)
    await asyncio.sleep(HANG_S)


async def gone(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Asks, and hangs up before the answer."""
    writer.write(GOOD)
    await writer.drain()
    writer.transport.abort()
    await asyncio.sleep(HANG_S)


KINDS: dict[str, Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]] = {
    each.__name__: each
    for each in (idle, slow_head, slow_body, endless_head, garbage, reset, deaf, gone)
}


async def drip(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Sends a byte now and then."""
    for byte in content:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(DRIP_S)


async def bother(port: int, kind: str, counts: Counter[str]) -> None:
    """One bad connection, opened again whenever it ends."""
    await asyncio.sleep(random.random() * DRIP_S)
    while True:
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            counts["refused"] += 1
            await asyncio.sleep(AGAIN_S)
            continue
        counts[kind] += 1
        try:
            await KINDS[kind](reader, writer)
        except (OSError, RuntimeError):
            pass  # The gateway has closed it; uvloop says so by a RuntimeError.
        finally:
            writer.transport.abort()
        await asyncio.sleep(AGAIN_S)


def attack(port: int, connections: int, counted: Connection) -> None:
    """All bad connections, in a process of their own, until the pipe says that it is enough."""
    allow_many_files()
    counts: Counter[str] = Counter()
    kinds = list(KINDS)

    async def run() -> None:
        tasks = [
            asyncio.create_task(bother(port, kinds[number % len(kinds)], counts))
            for number in range(connections)
        ]
        while len(counts.keys() & KINDS) < len(KINDS):
            await asyncio.sleep(0.05)
        counted.send("begun")
        await asyncio.to_thread(counted.poll, None)
        assert not any(task.done() for task in tasks)
        counted.send(dict(counts))
        os._exit(0)

    uvloop.run(run())


def watch(gateway: psutil.Process) -> dict[str, float]:
    """What the gateway takes now."""
    return {"rss_mib": round(gateway.memory_info().rss / 2**20, 1), "files": gateway.num_fds()}


def measure(port: int, gateway: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """Before, during and after."""
    phases: dict[str, Any] = {}

    def phase(name: str) -> None:
        figures = uvloop.run(Load(port, [GOOD]).run(CALLERS, options.seconds / PHASES))
        phases[name] = {**figures, **watch(gateway)}
        print(name, json.dumps(phases[name]), flush=True)

    phase("before")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    # It ends with this process, whatever goes wrong here.
    bad = spawn.Process(target=attack, args=(port, options.connections, theirs), daemon=True)
    bad.start()
    theirs.close()
    assert ours.recv() == "begun"
    for number in range(PHASES - 2):
        phase(f"during {number + 1}")
    ours.send("stop")
    opened = ours.recv()
    bad.join()
    phase("after")
    return {"phases": phases, "opened": opened}


def main() -> None:
    """Runs it; prints a line for each phase, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Batchery(model_folder("tiny", Path(folder)))
        try:
            gateway = psutil.Process(server.pids()["gateway"])
            figures = measure(server.port, gateway, options)
        finally:
            server.stop()
    report = {
        "hardware": hardware(),
        "command": command("http.attack"),
        "connections": options.connections,
        "seconds": options.seconds,
        **figures,
    }
    print(json.dumps(report["opened"]))
    write_report(options.json, report)


if __name__ == "__main__":
    main()
