"""Device processes on an event loop: both are real."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kombu.asynchronous import Hub

from batchery import AppNotImportable
from batchery_worker.fleet import MAX_FAILED_STARTS, Fleet
from batchery_worker.process import State
from batchery_worker.wire import Setup

HERE = str(Path(__file__).parent)


def setup(app: str = "device_app:app") -> Setup:
    return Setup(
        device="cpu",
        sys_path=(HERE, *sys.path),
        app=app,
        modules=[],
        load=[],
        log_level=60,
    )


class Crew:
    """A fleet of one device, and what it has told."""

    def __init__(self, app: str) -> None:
        self.ready = 0
        self.deaths: list[str] = []
        self.lost: list[str] = []
        self.hub = Hub()
        self.fleet = Fleet(
            [setup(app)],
            on_ready=self._on_ready,
            on_done=lambda *_: None,
            on_death=lambda _, how: self.deaths.append(how),
            on_lost=self.lost.append,
        )

    def _on_ready(self) -> None:
        self.ready += 1

    def run_until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, "nothing happened"
            self.hub.run_once()


@pytest.fixture
def crews() -> Iterator[Callable[[str], Crew]]:
    made: list[Crew] = []

    def make(app: str = "device_app:app") -> Crew:
        made.append(Crew(app))
        return made[-1]

    yield make
    for crew in made:
        crew.fleet.stop(kill_at_once=True)
        crew.hub.close()


def test_a_device_that_dies_is_replaced(crews: Callable[..., Crew]) -> None:
    crew = crews()
    crew.fleet.start(crew.hub, 60, lambda: None)
    (device,) = crew.fleet
    first = device.pid
    device.kill()
    crew.run_until(lambda: crew.ready == 2)
    assert device.pid != first
    assert crew.deaths == ["device process for cpu died: killed by signal 9"]
    assert not crew.lost


def test_a_retired_fleet_replaces_nothing(crews: Callable[..., Crew]) -> None:
    crew = crews()
    crew.fleet.start(crew.hub, 60, lambda: None)
    (device,) = crew.fleet
    crew.fleet.retire()
    device.kill()
    crew.run_until(lambda: crew.deaths)
    crew.hub.call_later(device.backoff_s, crew.lost.append, "enough time has passed")
    crew.run_until(lambda: crew.lost)
    assert device.state is State.DEAD


def test_a_device_that_never_starts_is_given_up(crews: Callable[..., Crew]) -> None:
    crew = crews("nowhere_to_be_found:app")
    crew.fleet.attach(crew.hub)
    crew.run_until(lambda: crew.lost)
    assert crew.lost == ["no device is left, the last one was cpu"]
    assert len(crew.deaths) == MAX_FAILED_STARTS - 1
    assert list(crew.fleet) == []


def test_a_start_that_fails_says_why(crews: Callable[..., Crew]) -> None:
    crew = crews("nowhere_to_be_found:app")
    with pytest.raises(AppNotImportable, match="nowhere_to_be_found"):
        crew.fleet.start(crew.hub, 60, lambda: None)


def test_what_a_device_has_said_is_read_without_a_loop(crews: Callable[..., Crew]) -> None:
    crew = crews()
    crew.fleet.start(crew.hub, 60, lambda: None)
    (device,) = crew.fleet
    device.kill()
    deadline_s = time.monotonic() + 10
    while not crew.deaths and time.monotonic() < deadline_s:
        crew.fleet.read()
    assert crew.deaths
