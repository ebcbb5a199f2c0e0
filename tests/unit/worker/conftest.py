"""Fakes of what a worker's pool stands between."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery import signals
from celery.utils.dispatch import Signal
from celery.worker import state as worker_state

from apps.batches import app
from batchery import install
from support.fake_devices import Clock, FakeDevices, Loop
from support.fake_worker import FakeWorker, StartPool


@pytest.fixture(autouse=True)
def _no_receivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets the receivers of apps that other tests import: they connect to servers."""
    every: list[Any] = [found for found in vars(signals).values() if isinstance(found, Signal)]
    for signal in every:
        monkeypatch.setattr(signal, "receivers", [])
        signal.sender_receivers_cache.clear()
    yield
    for signal in every:
        signal.sender_receivers_cache.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the event loop, and of those that plan on it."""
    made = Clock()
    planners = ("dispatch.dispatcher", "dispatch.demand", "device_pool.supervisor")
    for module in (*planners, "metrics", "device_pool.process"):
        monkeypatch.setattr(f"batchery_worker.{module}.monotonic", made)
    return made


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevices]:
    """Device processes that do what the test says."""
    made = FakeDevices(monkeypatch)
    yield made
    for device in made.started:
        device.die()


@pytest.fixture
def start_pool(
    clock: Clock, devices: FakeDevices, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartPool]:
    """Starts pools on fake devices of these names, with settings; they end with the test."""
    made: list[FakeWorker] = []
    monkeypatch.setattr(worker_state, "should_stop", None)
    monkeypatch.setattr(worker_state, "should_terminate", None)

    def start(*names: str, **settings: Any) -> FakeWorker:
        # As in a worker, where completion threads find the app, too.
        monkeypatch.setattr("celery._state.default_app", app)
        install(app, devices=list(names or ["cpu"]), **settings)
        made.append(FakeWorker(app, devices, Loop(clock)))
        return made[-1]

    yield start
    for worker in made:
        worker.pool.terminate()
    worker_state.reset_state()
