"""Device processes on an event loop: both are real."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kombu.asynchronous import Hub

from batchery import AppNotImportable, ModelLoadError
from batchery_worker.device_pool.process import (
    DeviceProcess,
    RecyclingLimits,
    start_process,
)
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.device_pool.supervisor import MAX_FAILED_STARTS, DeviceSupervisor
from batchery_worker.in_flight import DispatchedBatch
from batchery_worker.ipc.messages import Done, Setup, Work
from batchery_worker.job import Batch, BatchKey, Job, Limits

NO_LIMITS = RecyclingLimits()
TESTS = str(Path(__file__).resolve().parents[1])


def setup(app: str = "apps.device_app:app", device: str = "cpu") -> Setup:
    return Setup(
        device=device,
        sys_path=(TESTS, *sys.path),
        app=app,
        modules=[],
        load=[],
        log_levels={"": 60},
    )


class Crew:
    """A supervisor of one device or more, and what it has told."""

    def __init__(self, app: str, devices: int, limits: RecyclingLimits) -> None:
        self.ready = 0
        self.done: list[tuple[int, Done]] = []
        self.deaths: list[str] = []
        self.lost: list[str] = []
        self.hub = Hub()
        self.supervisor = DeviceSupervisor(
            [DeviceProcess(setup(app), start_process) for _ in range(devices)],
            limits,
            on_ready=self._on_ready,
            on_done=self._on_done,
            on_death=lambda _, how: self.deaths.append(how),
            on_lost=self.lost.append,
        )

    def _on_ready(self) -> None:
        self.ready += 1

    def _on_done(self, _: DispatchedBatch, done: Done, device: DeviceProcess) -> None:
        self.done.append((device.pid, done))

    def send(self, device: DeviceProcess, number: int) -> None:
        """Hands over a batch of one job."""
        work = Work(
            number, "apps.device_app.double", {}, [(str(number), [number], False)], 64, None
        )
        job: Job[Any] = Job(str(number), BatchKey("task"), Limits(8), 1, 0.0, None)
        self.supervisor.send(device, work, DispatchedBatch(Batch((job,)), 0.0))

    def pids(self) -> list[int]:
        return [device.pid for device in self.supervisor.devices]

    def run_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, "nothing happened"
            self.hub.run_once()


@pytest.fixture
def crews() -> Iterator[Callable[[str], Crew]]:
    made: list[Crew] = []

    def make(
        app: str = "apps.device_app:app", devices: int = 1, limits: RecyclingLimits = NO_LIMITS
    ) -> Crew:
        made.append(Crew(app, devices, limits))
        return made[-1]

    yield make
    for crew in made:
        crew.supervisor.stop(kill_at_once=True)
        crew.hub.close()


def test_no_file_of_the_working_directory_hides_a_module_of_python(
    crews: Callable[..., Crew], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The `celery` command finds the right one.
    (tmp_path / "queue.py").write_text("raise LookupError('not this one')")
    monkeypatch.chdir(tmp_path)
    crew = crews()
    crew.supervisor.start(crew.hub, 60, lambda: None)
    assert crew.ready == 1


def test_a_device_that_never_starts_is_given_up(crews: Callable[..., Crew]) -> None:
    crew = crews("nowhere_to_be_found:app")
    crew.supervisor.attach(crew.hub)
    crew.run_until(lambda: crew.lost)
    assert crew.lost == ["no device is left, the last one was cpu"]
    assert len(crew.deaths) == MAX_FAILED_STARTS - 1
    assert list(crew.supervisor.devices) == []


def test_a_start_that_fails_says_why(crews: Callable[..., Crew]) -> None:
    crew = crews("nowhere_to_be_found:app")
    with pytest.raises(AppNotImportable, match="nowhere_to_be_found"):
        crew.supervisor.start(crew.hub, 60, lambda: None)


def test_a_start_that_takes_too_long_names_the_devices_and_their_models(
    crews: Callable[..., Crew], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its first model waits at a gate that stays shut, however quick the machine is.
    monkeypatch.setenv("GATE_FOLDER", str(tmp_path))
    crew = crews("apps.slow_start:app", devices=2)
    for device in crew.supervisor.devices:
        device.setup = replace(device.setup, load=["slow", "small"])
    names = [f"{each.name} (slow, small)" for each in crew.supervisor.devices]
    with pytest.raises(ModelLoadError) as caught:
        crew.supervisor.start(crew.hub, 0, lambda: None)
    assert str(caught.value).startswith(f"not ready after 0 s: {', '.join(names)};")


def test_a_device_starts_once_there_is_a_thread_for_its_log(
    crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [RuntimeError("can't start new thread") for _ in range(2)]
    start = threading.Thread.start

    def start_later(thread: threading.Thread) -> None:
        if failures and thread.name == "batchery-log":
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    crew = crews()
    crew.supervisor.attach(crew.hub)
    crew.run_until(lambda: crew.ready)
    assert not failures


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
