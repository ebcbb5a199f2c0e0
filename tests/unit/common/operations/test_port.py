"""The port: what it answers, and that nobody holds it up."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from batchery.errors import StartError
from batchery.operations import port as module
from batchery.operations.port import MAX_CALLS, MAX_HEAD_BYTES, Port
from support.harness import wait_for

#: More than the buffers of both sockets hold.
LONG = b"x" * 2**24


class Scene:
    """A port, and what it says."""

    def __init__(self) -> None:
        self.text = b"batchery_broker_up 1.0\n"
        self.live = self.ready = ""
        self.asked: list[str] = []
        self.port = Port("127.0.0.1", 0, self.encode, lambda: self.live, lambda: self.ready)
        self.port.start()

    def encode(self, accept: str) -> tuple[bytes, str]:
        self.asked.append(accept)
        if accept == "error":
            raise LookupError("no figures")
        return self.text, "text/plain; version=0.0.4"

    @property
    def address(self) -> Any:
        return self.port.server_address

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        host, port = self.address
        connection = http.client.HTTPConnection(host, port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    with contextlib.closing(made.port):
        yield made


def test_metrics_and_health_are_answered(scene: Scene) -> None:
    assert scene.get("/metrics?x=1", Accept="text/plain") == (200, scene.text)
    assert scene.asked == ["text/plain"]
    assert (scene.get("/livez"), scene.get("/readyz")) == ((200, b"ok\n"), (200, b"ok\n"))
    scene.ready = "Redis does not answer"
    assert (scene.get("/livez")[0], scene.get("/readyz")) == (
        200,
        (503, b"Redis does not answer\n"),
    )
    scene.live = "device cpu hung"
    assert scene.get("/livez") == (503, b"device cpu hung\n")
    assert scene.get("/")[0] == 404


def test_metrics_that_cannot_be_made_are_an_error_that_is_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert scene.get("/metrics", Accept="error")[0] == 500
    assert "no figures" in caplog.text
    assert scene.get("/metrics")[0] == 200


def test_port_that_is_taken_is_one_line(scene: Scene) -> None:
    _, taken = scene.address
    with pytest.raises(StartError, match=rf"cannot listen on 127.0.0.1:{taken}: Address already"):
        Port("127.0.0.1", taken, scene.encode, str, str)
    with pytest.raises(StartError, match=r"no\.such\.host"):
        Port("no.such.host.invalid", 0, scene.encode, str, str)


def test_port_of_the_sixth_internet_protocol_has_a_url() -> None:
    with (
        contextlib.suppress(StartError),
        contextlib.closing(Port("::1", 0, lambda _: (b"", ""), str, str)) as made,
    ):
        assert made.url == f"http://[::1]:{made.server_address[1]}"


def test_caller_that_reads_nothing_holds_up_nobody_and_is_cut_off(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CALL_S", 0.5)
    scene.text = LONG
    with scene.connect() as slow:
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_for(lambda: scene.asked, "its answer is made")
        scene.text = b"short"
        assert scene.get("/metrics") == (200, b"short")
        wait_for(lambda: scene.port._calls._value == MAX_CALLS, "it is cut off")


def test_caller_that_sends_a_byte_at_a_time_is_cut_off_in_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CALL_S", 0.5)
    with scene.connect() as slow:
        slow.sendall(b"G")
        wait_for(lambda: scene.port._calls._value < MAX_CALLS, "it is served")

        def is_cut_off() -> bool:
            with contextlib.suppress(OSError):
                slow.sendall(b"E")
            return scene.port._calls._value == MAX_CALLS

        wait_for(is_cut_off, "it is cut off, whatever it sends")
    assert scene.get("/livez")[0] == 200


def test_request_without_end_is_refused(scene: Scene) -> None:
    with scene.connect() as caller, contextlib.suppress(OSError):
        caller.sendall(b"GET /livez HTTP/1.0\r\n" + b"X-Long: " + b"x" * 10 * MAX_HEAD_BYTES)
        assert caller.recv(4096) == b""
    assert scene.get("/livez")[0] == 200


def test_there_are_few_callers_at_once(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CALLS):
            stack.enter_context(scene.connect())
        wait_for(lambda: scene.port._calls._value == 0, "all are served")
        with scene.connect() as late:
            assert late.recv(10) == b""
    wait_for(lambda: scene.port._calls._value == MAX_CALLS, "all have gone")
    assert scene.get("/livez")[0] == 200


def test_caller_for_whom_no_thread_is_left_takes_nobody_else_s_place(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_CALLS):
            with scene.connect() as caller:
                assert caller.recv(10) == b""
    assert scene.get("/livez") == (200, b"ok\n")
