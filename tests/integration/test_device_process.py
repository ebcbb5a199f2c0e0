"""The device process: parts of it here, the whole of it as the real process."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from batchery import (
    DeviceUnavailable,
    Failed,
    InvalidItem,
    Model,
    ModelLoadError,
    install,
    register,
)
from batchery.execution.bisect_failures import has_run_out
from batchery_worker.device.start import check_device
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.ipc.messages import (
    NotReady,
    Reply,
    Setup,
    dump_message,
    load_reply,
)
from batchery_worker.serving.loading import load_model
from support.patience import patient

TESTS = str(Path(__file__).resolve().parents[1])
backend = Celery("parent", broker="memory://", set_as_current=False).backend


def setup(**changes: Any) -> Setup:
    given = {
        "device": "cpu",
        "sys_path": (TESTS, *sys.path),
        "app": "apps.device_app:app",
        "modules": ["apps.device_app"],
        "load": ["lengths"],
        "log_levels": {"": 50},
    }
    return Setup(**{**given, **changes})


class Process:
    """A real device process, and its parent's end of the pipe."""

    def __init__(self, first: Setup) -> None:
        self.end, theirs = socket.socketpair()
        self.end.settimeout(patient(60))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "batchery_worker.device", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        write_frame(self.end, dump_message(first))

    def read(self) -> Reply:
        return load_reply(read_frame(self.end))


@contextlib.contextmanager
def started(first: Setup) -> Iterator[Process]:
    process = Process(first)
    try:
        yield process
    finally:
        process.end.close()
        process.process.kill()
        process.process.wait()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"app": "no_such_module:app"}, "no_such_module"),
        ({"app": "apps.device_app:nothing"}, "nothing"),
        ({"load": ["broken"]}, "'broken' cannot be loaded on cpu"),
        ({"load": ["cold"]}, "not even warm-up works"),
    ],
)
def test_a_device_that_cannot_start_says_why_in_one_line(
    changes: dict[str, Any], words: str
) -> None:
    with started(setup(**changes)) as process:
        reply = process.read()
        assert isinstance(reply, NotReady)
        assert words in reply.text
        assert "\n" not in reply.text
        assert process.process.wait(patient(30)) == 0


def test_a_device_that_cannot_start_waits_for_no_thread_of_its_app(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    (tmp_path / "with_a_thread.py").write_text(code + "print('imported')\n")
    changes = {"sys_path": (str(tmp_path), TESTS, *sys.path), "modules": ["with_a_thread"]}
    with started(setup(load=["broken"], **changes)) as process:
        assert isinstance(process.read(), NotReady)
        assert process.process.wait(patient(30)) == 0
    assert "imported" in capfd.readouterr().out


# In this process


@pytest.fixture
def app() -> Celery:
    return install(Celery("here", broker="memory://", set_as_current=False))


def test_a_model_is_loaded_and_warmed_up(app: Celery) -> None:
    calls: list[Any] = []

    class Warm(Model):
        def load(self, device: str) -> None:
            calls.append(device)

        def warm_up(self) -> Sequence[int]:
            return [1, 2]

        def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
            calls.append(list(batch))
            return batch

    assert isinstance(load_model(register(app, "warm", Warm), "cpu"), Warm)
    assert calls == ["cpu", [1, 2]]


def test_a_model_that_does_not_load_is_named(app: Celery) -> None:
    class Missing(Model):
        def load(self, device: str) -> None:
            raise FileNotFoundError("weights.bin")

    task = register(app, "missing", Missing)
    with pytest.raises(ModelLoadError, match=r"'missing'.*on cpu: FileNotFoundError: weights.bin"):
        load_model(task, "cpu")
    with pytest.raises(ModelLoadError, match=r"'nowhere'"):
        load_model(register(app, "nowhere", "no.such.module:Model"), "cpu")


def test_an_error_of_ours_is_passed_on_as_it_is(app: Celery) -> None:
    class Picky(Model):
        def load(self, device: str) -> None:
            raise ModelLoadError("model x: use another one")

    with pytest.raises(ModelLoadError, match=r"^model x: use another one$"):
        load_model(register(app, "picky", Picky), "cpu")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Failed("not a text"), "ItemFailed: not a text"),
        (Failed(InvalidItem("too long")), "InvalidItem: too long"),
        (None, "WrongLength: "),
        (MemoryError("full"), "OutOfMemory: "),
    ],
)
def test_a_model_that_refuses_its_own_warm_up_is_named(
    app: Celery, outcome: Failed | MemoryError | None, words: str
) -> None:
    class Refusing(Model):
        def load(self, device: str) -> None:
            """Loads nothing."""

        def warm_up(self) -> Sequence[str]:
            return ["warm"]

        def forward(self, batch: Sequence[str], **_: Any) -> list[Any]:
            if isinstance(outcome, MemoryError):
                raise outcome
            return [] if outcome is None else [outcome for _ in batch]

    task, why = register(app, "refusing", Refusing), f"^model 'refusing' cannot .* on cpu: {words}"
    with pytest.raises(ModelLoadError, match=why) as raised:
        load_model(task, "cpu")
    # Then others make room for it.
    assert has_run_out(raised.value) == (words == "OutOfMemory: ")


def test_the_cpu_is_always_there_and_needs_no_torch() -> None:
    script = (
        "import sys; from batchery_worker.device.start import check_device;"
        " check_device('cpu'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match=r"'cuda:99': not on this machine.*there is cpu"):
        check_device("cuda:99")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 3", ""),
        ("echo Traceback >&2; echo 'ImportError: libcudart' >&2; exit 1", "ImportError: libcudart"),
        ("echo a greeting", "invalid literal for int"),
    ],
)
def test_that_the_cpu_computes_beside_a_gpu_is_logged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    why: str,
) -> None:
    (tmp_path / "nvidia0").touch()
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr("batchery_worker.device_pool.startup.Path", lambda _: tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    devices = choose_devices("auto")
    assert devices == (["cpu"] if why else ["cuda:0", "cuda:1", "cuda:2"])
    assert why in caplog.text
    assert ("this worker computes on the CPU" in caplog.text) == bool(why)
