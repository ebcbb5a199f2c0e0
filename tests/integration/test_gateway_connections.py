"""Callers who send slowly, read nothing or hang up: the guard before a small application."""

import asyncio
import json
import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import psutil
import pytest
import uvicorn

from batchery.gateway_settings import GatewaySettings
from batchery.settings import Settings
from batchery_producer.gateway import guard
from batchery_producer.gateway.callers import Callers, make_key
from batchery_producer.gateway.connection import Connection
from batchery_producer.gateway.guard import Guard
from batchery_producer.gateway.metrics import Measurements
from conftest import StartGateway
from support.gateway import EMBED, metric_samples
from support.harness import wait_for
from support.patience import patient

KEY, HASH = make_key()
TWO_KEY, TWO_HASH = make_key()
OTHER_KEY, OTHER_HASH = make_key()

#: Of one and of two requests at a time, and one without a limit.
KEYS = {
    "one": {"hash": HASH, "max_concurrency": 1},
    "two": {"hash": TWO_HASH, "max_concurrency": 2},
    "other": {"hash": OTHER_HASH},
}

#: More than the kernel takes for one who does not read.
BIG_BYTES = 16 << 20


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with how long the body is; on `/big` with much more, on `/hang` never."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/hang":
        await asyncio.Event().wait()
    body = b"x" * BIG_BYTES if scope["path"] == "/big" else json.dumps(size).encode()
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/late":
        # The caller has all of it, and the answer has not ended.
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0.5)
        body = b""
    await send({"type": "http.response.body", "body": body})


class Door:
    """The guard's address, and calls to it."""

    def __init__(self, port: int, server: uvicorn.Server) -> None:
        self.port, self.server = port, server

    def connect(self, *, narrow: bool = False) -> socket.socket:
        """A connection; a narrow one takes few bytes that nobody reads."""
        caller = socket.socket()
        caller.settimeout(patient(60))
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if narrow:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", self.port))
        return caller

    def status(self, key: str, path: str = "/small", body: bytes = b"") -> int:
        """What a request is answered with."""
        with closing(self.connect()) as caller:
            caller.sendall(head(path, key, len(body), "Connection: close") + body)
            return int(read_all(caller).split()[1])


def head(path: str, key: str, length: int, *more: str) -> bytes:
    lines = (
        *(f"POST {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"),
        *(f"Content-Length: {length}", *more),
    )
    return "\r\n".join((*lines, "", "")).encode()


def read_all(caller: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := caller.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


def read_answer(caller: socket.socket) -> bytes:
    """One answer, whose head and body may come apart, and nothing behind it."""
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += caller.recv(1, socket.MSG_WAITALL)
    length = re.search(rb"content-length: (\d+)", answer)
    assert length, answer
    return answer + caller.recv(int(length[1]), socket.MSG_WAITALL)


@contextmanager
def serving(**wanted: Any) -> Iterator[Door]:
    """A guard with these settings, in a thread."""
    gateway = GatewaySettings.model_validate({"keys": KEYS, **wanted})
    settings = Settings().model_copy(update={"gateway": gateway})
    measurements = Measurements()
    web = Guard(application, callers=Callers(settings), settings=gateway, measurements=measurements)
    options: Any = {"loop": "uvloop", "lifespan": "off", "log_config": None}
    config = uvicorn.Config(web, http=Connection, timeout_graceful_shutdown=1, **options)
    server = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            wait_for(lambda: server.started, "it serves")
            yield Door(listening.getsockname()[1], server)
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    """Waits long for whoever sends slowly."""
    with serving(body_timeout_s=600) as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[Door]:
    """Gives up soon whoever sends slowly."""
    # Longer than this process stands still between two calls.
    with serving(body_timeout_s=patient(1)) as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    """Connections that end with the test."""
    with ExitStack() as stack:
        yield stack


def ask_and_read_nothing(door: Door, stack: ExitStack, key: str = KEY) -> socket.socket:
    """Asks for a long answer; returns when it has begun to come."""
    caller = stack.enter_context(door.connect(narrow=True))
    caller.sendall(head("/big", key, 0, "Connection: close"))
    assert caller.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL) == b"HTTP/1.1 200"
    return caller


def test_request_is_in_flight_until_its_answer_is_read(door: Door, sockets: ExitStack) -> None:
    caller = ask_and_read_nothing(door, sockets)
    assert door.status(KEY) == 429
    assert door.status(OTHER_KEY) == 200
    assert len(read_all(caller)) > BIG_BYTES
    wait_for(lambda: door.status(KEY) == 200, "the place is free again")


def test_unread_answers_of_a_key_are_bounded(
    monkeypatch: pytest.MonkeyPatch, sockets: ExitStack
) -> None:
    monkeypatch.setattr(guard, "MAX_BUFFERED_BYTES", 4 * BIG_BYTES)
    with serving(body_timeout_s=600) as door:
        callers = [ask_and_read_nothing(door, sockets, OTHER_KEY) for _ in range(6)]
        # One answer of a key may have any size; the last ones are cut off.
        sizes = [len(read_all(each)) for each in callers]
        assert sizes[0] > BIG_BYTES
        assert sizes[-1] < BIG_BYTES
        assert door.status(TWO_KEY) == 200


def test_bodies_that_one_key_does_not_end_leave_room_for_others(
    monkeypatch: pytest.MonkeyPatch, sockets: ExitStack
) -> None:
    monkeypatch.setattr(guard, "MAX_BUFFERED_BYTES", 64 << 20)
    with serving(body_timeout_s=600) as door:

        def has_its_share() -> bool:
            # One after the other: bodies that grow side by side would refuse each other.
            caller = sockets.enter_context(door.connect())
            with suppress(OSError):  # The last one is refused before its end.
                caller.sendall(head("/small", OTHER_KEY, 16 << 20) + b" " * ((16 << 20) - 1))
            return door.status(OTHER_KEY, body=b" " * 500) == 429

        wait_for(has_its_share, "this key has its share")
        assert door.status(TWO_KEY, body=b" " * 500) == 200


def test_open_bodies_are_counted_by_key(door: Door, sockets: ExitStack) -> None:
    opening = head("/small", TWO_KEY, 100) + b"{"
    sockets.enter_context(door.connect()).sendall(opening)
    assert door.status(TWO_KEY) == 200
    sockets.enter_context(door.connect()).sendall(opening)
    wait_for(lambda: door.status(TWO_KEY) == 429, "two bodies are open")
    assert door.status(OTHER_KEY) == 200


def test_body_that_comes_too_slowly_is_given_up(hasty: Door) -> None:
    with closing(hasty.connect()) as slow:
        slow.sendall(head("/small", KEY, 100) + b"{")
        assert read_all(slow).startswith(b"HTTP/1.1 408")
    wait_for(lambda: hasty.status(KEY) == 200, "no place is taken")


def test_request_that_comes_with_the_end_of_a_refused_body_is_answered(door: Door) -> None:
    following = head("/small", KEY, 0, "Connection: close")
    with closing(door.connect()) as caller:
        caller.sendall(head("/small", "wrong", 5))
        assert read_answer(caller).startswith(b"HTTP/1.1 401")
        for part in (b"12345" + following[:20], following[20:]):
            caller.sendall(part)
        assert read_all(caller).startswith(b"HTTP/1.1 200")


def test_caller_can_send_a_body_to_its_end_that_is_refused(door: Door) -> None:
    # Most clients read nothing before they have sent all.
    with closing(door.connect()) as caller:
        caller.sendall(head("/small", KEY, 40_000_000))
        for _ in range(40):
            caller.sendall(b" " * 1_000_000)
        assert caller.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 413"


@pytest.mark.parametrize("parts", [1, 70])
def test_head_that_is_too_large_is_answered(door: Door, parts: int) -> None:
    large = head("/small", KEY, 0, "X-Large: " + "x" * 70_000)
    with closing(door.connect()) as caller:
        step = len(large) // parts + 1
        with suppress(OSError):
            for part in range(0, len(large), step):
                caller.sendall(large[part : part + step])
        answer = read_all(caller)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
    assert b"more than 65536 bytes" in answer


def test_head_without_end_is_cut_off(door: Door) -> None:
    headers = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 1000) for number in range(1000))
    with closing(door.connect()) as endless:
        endless.sendall(b"GET /health HTTP/1.1\r\n")

        def send_on() -> None:
            while True:
                endless.sendall(headers)

        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            send_on()


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_offer_of_another_protocol_is_passed_over(
    door: Door, *, is_chunked: bool, is_joined: bool
) -> None:
    """As Java's client asks first on each connection, in packets of its own for head and body."""
    body = b'{"inputs": "a"}'
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    lines = (
        *("POST /small HTTP/1.1", "Connection: Upgrade, HTTP2-Settings", "Host: localhost"),
        *("HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA", length, "Upgrade: h2c"),
        *(f"Authorization: Bearer {OTHER_KEY}", "", ""),
    )
    opening = "\r\n".join(lines).encode()
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    with closing(door.connect()) as caller:
        for part in [opening + content] if is_joined else [opening, content]:
            caller.sendall(part)
            select.select([caller], [], [], 0.2)
        assert caller.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
        # The next request follows on the same connection.
        caller.sendall(head("/small", OTHER_KEY, 0, "Connection: close"))
        answers = read_all(caller)
    assert b"\r\n\r\n15HTTP/1.1 200" in answers, answers


def test_unread_pipeline_costs_little_memory(door: Door, sockets: ExitStack) -> None:
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    for _ in range(8):
        caller = sockets.enter_context(door.connect())
        request = head("/small", OTHER_KEY, 0)
        with suppress(BlockingIOError):
            caller.send(request * 3000, socket.MSG_DONTWAIT)
        assert caller.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 200"
    # A request that waits takes two kilobytes.
    assert process.memory_info().rss - before_bytes < 24 << 20


def test_each_answer_has_a_request_id(door: Door) -> None:
    def told(given: str) -> str:
        with closing(door.connect()) as caller:
            more = (f"X-Request-Id: {given}", "Connection: close")
            caller.sendall(head("/small", OTHER_KEY, 0, *more))
            found = re.search(rb"x-request-id: (.+)\r\n", read_all(caller))
            assert found
            return found[1].decode()

    assert told("order-7:a/b.c") == "order-7:a/b.c"
    for wrong in ("a b", 'a"b', "x" * 129, ""):
        assert re.fullmatch("[0-9a-f]{32}", told(wrong))


def test_call_longer_than_the_grace_time_is_sent_elsewhere() -> None:
    with serving() as door, closing(door.connect()) as caller:
        caller.sendall(head("/hang", OTHER_KEY, 0))
        wait_for(lambda: door.server.server_state.tasks, "it runs")
        door.server.should_exit = True
        answer = read_all(caller)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in answer


def test_request_that_comes_before_an_answer_has_ended_waits_for_its_turn(door: Door) -> None:
    with closing(door.connect()) as caller:
        caller.sendall(head("/late", OTHER_KEY, 0))
        assert caller.recv(1000, socket.MSG_PEEK).startswith(b"HTTP/1.1 200")
        caller.sendall(head("/small", OTHER_KEY, 5, "Connection: close") + b"12345")
        assert read_all(caller).count(b"HTTP/1.1 200") == 2


def test_upload_that_stops_is_given_up(hasty: Door, sockets: ExitStack) -> None:
    caller = sockets.enter_context(hasty.connect())
    caller.sendall(head("/v1/files", KEY, 1_000_000) + b"x" * 1000)
    assert caller.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 408"
    wait_for(lambda: hasty.status(KEY) == 200, "its place is free")


def test_callers_who_hang_up_are_499_wherever_they_are(start_gateway: StartGateway) -> None:
    idle = {"embed": {**EMBED["embed"], "queue": "nobody"}}
    labels = {"labels": {**idle["embed"], "kind": "classification"}}
    gateway = start_gateway(models={**idle, **labels})
    with gateway.connect() as caller:
        caller.sendall(head("/v1/embeddings", "", 1_000) + b'{"input": ')
        # It breaks off.
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with gateway.connect() as caller:
        kind = "Content-Type: multipart/form-data; boundary=b"
        part = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        caller.sendall(head("/v1/files", "", 1_000_000, kind) + part)
    with gateway.sent("/predict", {"inputs": "a"}):
        in_flight = ("batchery_gateway_requests_in_flight", ())
        wait_for(lambda: metric_samples(gateway)[in_flight] >= 2, "it runs")
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
