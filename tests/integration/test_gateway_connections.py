"""Callers who send slowly, read nothing or hang up; and a gateway that is stopped or held up."""

import asyncio
import json
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx2
import psutil
import pytest
import uvicorn

from batchery_producer.gateway.callers import make_key
from batchery_producer.gateway.connection import Connection
from conftest import StartGateway
from support.gateway import EMBED, GatewayProcess, metric_samples
from support.harness import wait_for
from support.patience import patient

KEY, HASH = make_key()
OTHER_KEY, OTHER_HASH = make_key()
TWO_KEY, TWO_HASH = make_key()
GREEDY_KEY, GREEDY_HASH = make_key()

#: Models that no worker serves.
IDLE = {
    "embed": {**EMBED["embed"], "queue": "nobody"},
    "labels": {**EMBED["embed"], "kind": "classification", "queue": "nobody"},
}

#: A text whose tokens, one for each character, are six megabytes as JSON: more than the kernel
#: takes for one who does not read.
LONG_TEXT = "!" * 99_000


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Connections that end with the test."""
    with ExitStack() as stack:
        yield stack


def head(path: str, key: str, content_length: int, *more: str) -> bytes:
    lines = (
        *(f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"),
        *(f"Content-Length: {content_length}", *more),
    )
    return "\r\n".join((*lines, "", "")).encode()


def ask_and_read_nothing(gateway: GatewayProcess, stack: ExitStack) -> socket.socket:
    """Asks for a long answer; returns when it has begun to come."""
    caller = stack.enter_context(connect_narrowly(gateway))
    body = json.dumps({"inputs": LONG_TEXT}).encode()
    caller.sendall(
        head("/tokenize", KEY, len(body), "Content-Type: application/json", "Connection: close")
    )
    caller.sendall(body)
    assert caller.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return caller


def read_all(caller: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := caller.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def status_of(gateway: GatewayProcess, key: str, body: object = None) -> int:
    """What a small request of a key is answered with."""
    answer = gateway.post(
        "/tokenize", body or {"inputs": "a"}, headers={"authorization": f"Bearer {key}"}
    )
    return answer.status_code


def keyed(**options: object) -> dict[str, object]:
    """Settings with keys of one and of two requests at a time, and one without a limit."""
    keys = {
        "one": {"hash": HASH, "max_concurrency": 1},
        "two": {"hash": TWO_HASH, "max_concurrency": 2},
        "other": {"hash": OTHER_HASH},
        "greedy": {"hash": GREEDY_HASH},
    }
    return {"keys": keys, **options}


@pytest.fixture(scope="module")
def patient_gateway(start_gateway: StartGateway) -> GatewayProcess:
    """Waits long for whoever sends or reads slowly."""
    return start_gateway(gateway=keyed(body_timeout_s=600))


@pytest.fixture(scope="module")
def hasty(start_gateway: StartGateway) -> GatewayProcess:
    """Gives up soon whoever sends or reads slowly."""
    return start_gateway(gateway=keyed(body_timeout_s=2, send_timeout_s=0.5))


def test_request_is_in_flight_until_its_answer_is_read(
    patient_gateway: GatewayProcess, sockets: ExitStack
) -> None:
    gateway = patient_gateway
    caller = ask_and_read_nothing(gateway, sockets)
    assert status_of(gateway, KEY) == 429
    assert status_of(gateway, OTHER_KEY) == 200
    _, _, content = read_all(caller).partition(b"\r\n\r\n")
    assert len(json.loads(content)[0]) > 40_000
    wait_for(lambda: status_of(gateway, KEY) == 200, "the place is free again")


def test_caller_who_reads_nothing_is_cut_off(hasty: GatewayProcess, sockets: ExitStack) -> None:
    caller = ask_and_read_nothing(hasty, sockets)
    wait_for(lambda: status_of(hasty, KEY) == 200, "the place is free")
    answer = read_all(caller)
    length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert len(answer) < length
    assert "Traceback" not in hasty.log


def test_pipelined_requests_are_answered_in_order(hasty: GatewayProcess) -> None:
    with hasty.connect() as caller, ThreadPoolExecutor() as pool:
        asked = []
        for index in range(400):
            # As heads end, but in a body.
            body = b'{"inputs": %b "a"}' % (b"\r\n\r\n" * index)
            what = (f"X-Request-Id: {index}", "Content-Type: application/json")
            last = ("Connection: close",) if index == 399 else ()
            asked.append(head("/tokenize", KEY, len(body), *what, *last) + body)
        sending = pool.submit(caller.sendall, b"".join(asked))
        answer = read_all(caller)
        sending.result()
    assert answer.count(b"HTTP/1.1 200") == 400
    ids = re.findall(rb"x-request-id: (\d+)", answer)
    assert [int(each) for each in ids] == list(range(400))


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_offer_of_another_protocol_is_passed_over(
    patient_gateway: GatewayProcess, *, is_chunked: bool, is_joined: bool
) -> None:
    """As Java's client asks first on each connection, in packets of its own for head and body."""
    body = b'{"inputs": "a"}'
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    lines = (
        *("POST /tokenize HTTP/1.1", "Connection: Upgrade, HTTP2-Settings", "Host: localhost"),
        *("HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", length, "Upgrade: h2c"),
        *("Content-Type: application/json", f"Authorization: Bearer {OTHER_KEY}", "", ""),
    )
    opening = "\r\n".join(lines).encode()
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    with patient_gateway.connect() as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in [opening + content] if is_joined else [opening, content]:
            caller.sendall(part)
            select.select([caller], [], [], 0.2)
        # The next request follows on the same connection.
        caller.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = read_all(caller)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"200"], answers
    assert b'"text":"a"' in answers
    assert "pgrade" not in patient_gateway.log


def test_unread_pipeline_costs_little_memory_and_no_traceback(
    start_gateway: StartGateway, sockets: ExitStack
) -> None:
    # One of its own, as bodies of other tests take memory.
    gateway = start_gateway(gateway=keyed())
    process = psutil.Process(gateway.process.pid)
    before_bytes = process.memory_info().rss
    callers = []
    for _ in range(8):
        caller = sockets.enter_context(connect_narrowly(gateway))
        caller.send(b"GET /page/page.js HTTP/1.1\r\n\r\n" * 9000, socket.MSG_DONTWAIT)
        assert caller.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"
        callers.append(caller)
    # A request that waits takes two kilobytes.
    assert process.memory_info().rss - before_bytes < 40 << 20
    for caller in callers:
        caller.close()
    wait_for(lambda: not established(process), "the gateway knows that they have gone")
    assert "Traceback" not in gateway.log


def connect_narrowly(gateway: GatewayProcess) -> socket.socket:
    """A connection that takes few bytes which nobody reads."""
    caller = socket.socket()
    caller.settimeout(60)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = gateway.url.removeprefix("http://").split(":")
    caller.connect((host, int(port)))
    return caller


def established(process: psutil.Process) -> list[object]:
    """Connections to the gateway."""
    port = {each.laddr.port for each in process.net_connections("tcp") if each.status == "LISTEN"}
    return [
        each
        for each in process.net_connections("tcp")
        if each.laddr.port in port and each.status != "LISTEN"
    ]


def test_bodies_that_one_key_does_not_end_leave_room_for_others(
    patient_gateway: GatewayProcess, sockets: ExitStack
) -> None:
    gateway = patient_gateway
    size_bytes = 16_777_216
    small = {"inputs": "a" * 500}

    def has_its_share() -> bool:
        # One after the other: bodies that grow side by side would refuse each other.
        caller = sockets.enter_context(gateway.connect())
        with suppress(OSError):  # The last one is refused before its end.
            caller.sendall(head("/v1/embeddings", GREEDY_KEY, size_bytes) + b" " * (size_bytes - 1))
        return status_of(gateway, GREEDY_KEY, small) == 429

    wait_for(has_its_share, "this key has its share")
    assert status_of(gateway, OTHER_KEY, small) == 200


def test_open_bodies_are_counted_by_key(
    patient_gateway: GatewayProcess, sockets: ExitStack
) -> None:
    gateway = patient_gateway
    opening = head("/v1/embeddings", TWO_KEY, 100) + b"{"
    sockets.enter_context(gateway.connect()).sendall(opening)
    assert status_of(gateway, TWO_KEY) == 200
    sockets.enter_context(gateway.connect()).sendall(opening)
    wait_for(lambda: status_of(gateway, TWO_KEY) == 429, "two bodies are open")
    assert status_of(gateway, OTHER_KEY) == 200


def test_upload_that_drips_is_given_up(hasty: GatewayProcess, sockets: ExitStack) -> None:
    caller = sockets.enter_context(hasty.connect())
    caller.sendall(upload_head())
    deadline_s = time.monotonic() + 60
    while not select.select([caller], [], [], 0.2)[0]:
        assert time.monotonic() < deadline_s, "the upload stays open"
        caller.sendall(b"x")
    assert caller.recv(12) == b"HTTP/1.1 408"
    wait_for(lambda: status_of(hasty, KEY) == 200, "its place is free")


def upload_head(key: str = KEY) -> bytes:
    """The beginning of an upload of a file."""
    return head("/v1/files", key, 1_000_000, "Content-Type: multipart/form-data; boundary=b") + (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )


def test_callers_who_hang_up_are_499_wherever_they_are(
    start_gateway: StartGateway, sockets: ExitStack
) -> None:
    gateway = start_gateway(models=IDLE)
    with gateway.connect() as caller:
        caller.sendall(head("/v1/embeddings", "", 1_000) + b'{"input": ')
    with gateway.connect() as caller:
        caller.sendall(upload_head(""))
    body = b'{"inputs": "a"}'
    with gateway.connect() as caller:
        # One that waits behind it, too.
        opening = head("/predict", "", len(body), "Content-Type: application/json")
        caller.sendall(opening + body + b"GET /health HTTP/1.1\r\n\r\n")
    with gateway.stream("/process-batch-stream", {"texts": ["a"]}) as answer:
        next(answer.iter_lines())

    def counted() -> bool:
        samples = metric_samples(gateway)
        return all(
            samples.get(("batchery_gateway_requests_total", (("route", route), ("status", "499"))))
            for route in ("/v1/embeddings", "/v1/files", "/predict", "/process-batch-stream")
        )

    wait_for(counted, "all are counted")
    assert "Traceback" not in gateway.log


def test_job_of_a_caller_who_hangs_up_before_its_first_piece_is_cancelled(
    start_gateway: StartGateway, store: Any
) -> None:
    writer = {"kind": "generation", "model": "nothing", "queue": "nobody"}
    gateway = start_gateway(models={"chat": writer})
    body = {"model": "chat", "prompt": "a", "stream": True}
    with gateway.sent("/v1/completions", body):
        wait_for(lambda: store.keys("batchery-reader:*"), "its job is sent")
    # That would stay for the grace time, and then until it expires.
    wait_for(lambda: not store.keys("batchery-reader:*"), "nobody wants it")


def test_calls_longer_than_the_grace_are_sent_elsewhere_when_it_stops(
    start_gateway: StartGateway,
) -> None:
    gateway = start_gateway(models=IDLE)

    def stream() -> list[str]:
        with gateway.stream("/process-batch-stream", {"texts": ["a"]}) as answer:
            return [line for line in answer.iter_lines() if line]

    with ThreadPoolExecutor() as pool:
        call = pool.submit(gateway.post, "/v1/embeddings", {"input": "a"})
        events = pool.submit(stream)
        in_flight = ("batchery_gateway_requests_in_flight", ())
        wait_for(lambda: metric_samples(gateway)[in_flight] == 3, "both, and this one")
        gateway.process.send_signal(signal.SIGTERM)
        answer = call.result()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        last = json.loads(events.result()[-1].removeprefix("data: "))
        assert (last["status"], last["kind"]) == ("error", "unavailable")
        assert last["retry_after_s"] == 1
    assert gateway.process.wait(60) == 0
    assert "Traceback" not in gateway.log


def test_process_that_is_held_up_for_a_while_goes_on(start_gateway: StartGateway) -> None:
    gateway = start_gateway("--processes", "2", models=IDLE)
    parent = psutil.Process(gateway.process.pid)

    def serving() -> set[int]:
        children = parent.children()
        return {each.pid for each in children if "spawn_main" in " ".join(each.cmdline())}

    wait_for(lambda: len(serving()) == 2, "two processes")
    before = serving()
    for pid in before:
        psutil.Process(pid).suspend()
    # Longer than Uvicorn's own supervisor waits.
    time.sleep(12)
    for pid in before & serving():
        psutil.Process(pid).resume()

    def answers() -> bool:
        with suppress(httpx2.TransportError):
            return gateway.get("/health", timeout=5).is_success
        return False

    wait_for(answers, "it serves")
    assert serving() == before


async def refuse(scope: Any, _: Any, send: Any) -> None:
    """Answers before the body has come."""
    assert scope["type"] == "http"
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def test_connection_is_closed_whose_body_came_after_its_answer() -> None:
    for rest in (b"12345", b"123"):
        asyncio.run(asyncio.wait_for(_send_late(rest), patient(20)))


async def _send_late(rest: bytes) -> None:
    http: Any = partial(Connection, head_timeout_s=600, send_timeout_s=600)
    config = uvicorn.Config(
        refuse, http=http, port=0, lifespan="off", log_config=None, timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401")
    writer.write(rest)
    assert await reader.read() == b""
    writer.close()
    server.should_exit = True
    await serving
