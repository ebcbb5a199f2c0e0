"""Facts of a machine: what is read of it without torch, and what a Flower shows to anybody."""

import ctypes
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchery.doctor import machine
from batchery.doctor.facts import FactUnknown, ModelFolder
from support.healthy_facts import make_model


class Driver:
    """As libcuda: two devices, for CUDA 12.4."""

    def __init__(self, code: int = 0) -> None:
        self._code = code

    def cuInit(self, _: int) -> int:
        return self._code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12040
        return 0


def test_devices_are_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert machine._read_driver() == (2, 12.4)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(code=100))
    count, driver = machine._read_driver()
    assert (count, type(driver)) == (0, FactUnknown)


def test_nobody_knows_the_devices_of_a_driver_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As after an update of the driver, before the machine was started again.
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(code=803))
    for fact in machine._read_driver():
        assert str(fact) == "the driver of CUDA does not start: error 803"


def test_machine_without_a_driver_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    count, driver = machine._read_driver()
    assert (count, str(driver)) == (0, "this machine has no driver of CUDA")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '12.8'", 12.8),
        ("cuda = '13.0'", 13.0),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_version_of_torch_is_read_from_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, expected: float | None
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.9.0'\n{line}\nhip = None\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(machine, "find_spec", lambda _: spec)
    assert machine._read_torch_cuda() == expected


def test_torch_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    with pytest.raises(FactUnknown, match="not installed"):
        machine._read_torch_cuda()


def test_this_machine_has_memory_and_limits() -> None:
    assert 0 < machine._read_memory_share() < 1
    assert machine._read_open_files() > 0


def test_folders_of_models_are_read_and_ids_of_a_hub_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "model.gguf").touch()
    server = {"kind": "generation", "engine": "openai", "base_url": "http://h/v1"}
    folders = machine.gather_models(
        {
            "here": make_model(model=str(tmp_path)),
            "file": make_model(model=str(tmp_path / "model.gguf")),
            "gone": make_model(model=str(tmp_path / "gone")),
            "hub": make_model(model="org/model"),
            "server": make_model(**server, model="gpt", revision=None),
        }
    )
    assert folders == {
        "here": ModelFolder(True, {".json", ".safetensors", ".gguf"}),
        "file": ModelFolder(True, {".gguf"}),
        "gone": ModelFolder(False, ()),
        "hub": None,
    }


class Pages(BaseHTTPRequestHandler):
    """A Flower: open, behind basic auth, or behind a page to log in."""

    def do_GET(self) -> None:
        if self.path.startswith("/locked"):
            self.send_response(401)
            self.end_headers()
        elif self.path == "/login/workers":
            self.send_response(302)
            self.send_header("Location", "/login")
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b"<title>Else</title>" if "else" in self.path else b"<title>Flower</title>"
            )

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def flower() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "is_open"), [("", True), ("/", True), ("/locked", False), ("/login", False)]
)
def test_flower_is_open_if_it_shows_its_workers(flower: str, path: str, is_open: bool) -> None:
    assert bool(machine._find_open_flower(flower + path)) is is_open


def test_another_server_is_no_flower(flower: str) -> None:
    assert machine._find_open_flower(f"{flower}/else") == ""


def test_where_nothing_answers_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_find_own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(machine, "FLOWER_PORT", 1)
    assert machine._find_open_flower(None) == ""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "flower.example:5555", "nonsense"])
def test_nobody_knows_whether_a_flower_is_open_that_was_named_and_does_not_answer(url: str) -> None:
    with pytest.raises(FactUnknown, match=f"^--flower {url}: "):
        machine._find_open_flower(url)
