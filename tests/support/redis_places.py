"""Where a Redis may be, for tests: behind TLS, behind a Sentinel."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.exceptions import RedisError

from benchmarks.redis_cluster import find_lasting_port
from support.harness import wait_for
from support.own_redis import redis_servers
from support.patience import patient

#: How a Sentinel calls the Redis that it watches.
MASTER = "mymaster"


def with_database(url: str, number: int) -> str:
    """The URL of another database of a Redis."""
    return urlsplit(url)._replace(path=f"/{number}").geturl()


def with_password(url: str, password: str) -> str:
    """The URL for whoever has no name and this password; for whoever has none, if it is empty."""
    parts = urlsplit(url)
    login = f":{password}@" if password else ""
    return parts._replace(netloc=f"{login}{parts.hostname}:{parts.port}").geturl()


class Certificate(NamedTuple):
    """One that signs itself, for 127.0.0.1."""

    authority: Path
    key: Path


def make_certificate(directory: Path) -> Certificate:
    """Needs openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    made = Certificate(directory / "cert.pem", directory / "key.pem")
    subprocess.run(
        [
            *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"],
            *["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
            *["-keyout", str(made.key), "-out", str(made.authority)],
        ],
        check=True,
        capture_output=True,
    )
    return made


@contextlib.contextmanager
def behind_tls(port: int, certificate: Certificate) -> Iterator[str]:
    """Puts TLS before a Redis, as not every redis-server is built with it; yields a URL."""
    started, stop = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    ports: list[int] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

    async def serve() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server = await asyncio.start_server(connect, "127.0.0.1", 0, ssl=context)
        async with server:
            ports.append(server.sockets[0].getsockname()[1])
            loops.append(asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(patient(30))
    try:
        options = f"ssl_cert_reqs=required&ssl_ca_certs={certificate.authority}"
        yield f"rediss://127.0.0.1:{ports[0]}/0?{options}"
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(patient(30))


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies one direction of a connection until its end."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort()


@contextlib.contextmanager
def behind_sentinel(
    directory: Path, port: int, sentinels: int = 1, down_after_s: float = patient(30)
) -> Iterator[str]:
    """Starts Sentinels that watch a Redis; yields a URL, or several in one.

    A Redis that has not answered them for `down_after_s` is dead to them, even if it was only busy.
    """
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(_sentinel(directory, port, down_after_s)) for _ in range(sentinels)
        ]
        yield ";".join(f"sentinel://127.0.0.1:{each}/0" for each in ports)


@contextlib.contextmanager
def _sentinel(directory: Path, port: int, down_after_s: float) -> Iterator[int]:
    """Starts a Sentinel; yields its port."""
    own_port = find_lasting_port()
    config = directory / f"sentinel-{own_port}.conf"
    config.write_text(
        f"port {own_port}\nbind 127.0.0.1\ndir {directory}\n"
        f"sentinel monitor {MASTER} 127.0.0.1 {port} 1\n"
        f"sentinel down-after-milliseconds {MASTER} {down_after_s * 1000:.0f}\n"
        # Two that vote for themselves at once try again after twice this time, and not six minutes.
        f"sentinel failover-timeout {MASTER} 5000\n"
    )
    command = [str(redis_servers()[0]), str(config), "--sentinel"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def answers() -> bool:
        with Redis(port=own_port) as client, contextlib.suppress(RedisError):
            return bool(client.execute_command("SENTINEL", "MASTERS"))
        return False

    try:
        wait_for(answers, "Sentinel answers")
        yield own_port
    finally:
        process.kill()
        process.wait()
