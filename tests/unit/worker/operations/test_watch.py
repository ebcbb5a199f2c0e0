"""What is seen of a worker: its devices, its connection, its heartbeats; and its figures."""

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import pytest
from celery.bootsteps import CLOSE, RUN  # type: ignore[attr-defined]

from apps.batches import FOUR
from batchery import Settings
from batchery_worker.operations import watch as module
from batchery_worker.operations.health import Verdict
from batchery_worker.operations.watch import WorkerWatch
from support.fake_worker import FakeWorker, StartPool
from support.patience import patient

EXPIRY_S = 5.0


class Scene:
    """A watch over a pool with fake devices, and a consumer that is the test's."""

    def __init__(self, worker: FakeWorker) -> None:
        self.loop = worker.loop
        figures = {"held": 3, "recovered": 1, "scripts": {"fetch": {"calls": 2, "seconds": 0.5}}}
        self.store = SimpleNamespace(
            beat_s=monotonic(), is_silent=False, expiry_s=EXPIRY_S, figures=lambda: figures
        )
        self.consumer = SimpleNamespace(
            pool=worker.pool,
            connection=object(),
            task_consumer=SimpleNamespace(
                queues=[SimpleNamespace(name="celery")],
                channel=SimpleNamespace(lease_store=self.store),
            ),
            blueprint=SimpleNamespace(state=RUN),
        )
        self.worker: Any = SimpleNamespace(
            pool=worker.pool, consumer=self.consumer, hostname="w1@host"
        )
        self.watch = WorkerWatch(self.worker, Settings.load(max_pass_s=10))
        self.consumer.controller = SimpleNamespace(watch=self.watch)

    def scrape(self) -> dict[str, float]:
        """Scrapes on a thread, while the loop turns; samples of several labels are left out."""
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(lambda: list(self.watch.collect()))
            self.loop.until(found.done, "it is scraped")
        return {
            sample.name: sample.value
            for family in found.result()
            for sample in family.samples
            if len(sample.labels) <= 2
        }


@pytest.fixture
def worker(start_pool: StartPool) -> FakeWorker:
    return start_pool("cpu")


@pytest.fixture
def scene(worker: FakeWorker) -> Scene:
    return Scene(worker)


def test_worker_is_judged_by_its_devices_its_connection_and_its_heartbeats(scene: Scene) -> None:
    assert scene.watch.judge() == Verdict("", "")
    scene.consumer.blueprint.state = CLOSE
    assert scene.watch.judge().not_ready == "the worker does not consume its queues"
    scene.consumer.blueprint.state = RUN
    scene.store.beat_s -= EXPIRY_S
    assert scene.watch.judge().not_ready == "Redis does not answer"
    # After the connection was lost there is no channel that knows of the leases.
    scene.consumer.connection = scene.consumer.task_consumer = None
    assert "Redis does not answer" in scene.watch.judge().not_ready
    assert scene.watch.judge().not_live == ""
    scene.worker.pool.terminate()
    assert scene.watch.judge().not_ready.startswith("the devices have not started")


def test_worker_is_not_ready_before_it_has_a_consumer(scene: Scene) -> None:
    del scene.worker.consumer
    assert scene.watch.judge() == Verdict("", "the worker does not consume its queues")


def test_metrics_come_from_the_event_loop_and_stay_if_it_stands_still(
    scene: Scene, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    worker.receive_each("a", "b", task=FOUR)
    worker.works()
    worker.device.answer()
    worker.loop.settle()
    samples = scene.scrape()
    assert samples["batchery_items_total"] == 2
    assert samples["batchery_leases_held"] == 3
    assert samples["batchery_redis_round_trips_total"] == 2
    assert (samples["batchery_worker_live"], samples["batchery_worker_ready"]) == (1, 1)
    assert 0 <= time() - samples["batchery_worker_start_time_seconds"] < patient(60)
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.05)
    scene.store.is_silent = True
    still = {
        sample.name: sample.value
        for family in scene.watch.collect()
        for sample in family.samples
        if len(sample.labels) <= 2
    }
    assert still["batchery_items_total"] == 2
    assert (still["batchery_worker_live"], still["batchery_worker_ready"]) == (1, 0)


def test_those_who_scrape_together_ask_the_loop_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    answer = scene.worker.pool.figures

    def figures() -> Any:
        asked.append(1)
        return answer()

    monkeypatch.setattr(scene.worker.pool, "figures", figures)
    scene.scrape()
    scene.scrape()
    assert len(asked) == 1


def test_worker_without_devices_has_its_leases(scene: Scene) -> None:
    scene.worker.pool = object()
    found = {
        sample.name: sample.value for family in scene.watch.collect() for sample in family.samples
    }
    assert (found["batchery_leases_held"], found["batchery_worker_ready"]) == (3, 1)


def test_lag_of_the_event_loop_is_its_worst(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now_s[0])
    assert scene.watch.figures()["loop_lag_s"] is None
    ticks: list[Any] = []
    scene.watch.measure_lag(SimpleNamespace(call_repeatedly=lambda _, tick: ticks.append(tick)))
    for passed_s in (1.0, 1.25, 1.0):
        now_s[0] += passed_s
        ticks[0]()
    assert scene.watch.figures()["loop_lag_s"] == 0.25
    for _ in range(module.MAX_TICKS):
        now_s[0] += 1.0
        ticks[0]()
    assert scene.watch.figures()["loop_lag_s"] == 0.0
