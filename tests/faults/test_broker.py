"""Cuts the connection to the broker, and takes the broker away, under a worker that is busy."""

import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from apps import ledger
from apps.ledger import executions
from benchmarks.chaos.proxy import Proxy
from conftest import StartWorker
from support.harness import Worker, ask, queue_length, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)
JOBS = 2000


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    port = urlsplit(redis_url).port
    assert port
    with Proxy(port) as made:
        yield made


@pytest.fixture
def proxy_url(redis_url: str, proxy: Proxy) -> str:
    return redis_url.replace(f":{urlsplit(redis_url).port}", f":{proxy.port}")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    ledger.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def test_worker_whose_connection_is_cut_three_times_repeats_nothing(
    start_worker: StartWorker, proxy: Proxy, proxy_url: str, redis_url: str, tmp_path: Path
) -> None:
    book = tmp_path / "ledger"
    jobs = ledger.write_down.submit_many(range(JOBS), {"ledger": str(book), "pause_s": 0.05})
    worker = start_worker("apps.ledger", env={"CELERY_BROKER_URL": proxy_url})
    (device,) = worker.devices()
    descriptors = psutil.Process(worker.pid).num_fds()
    settled: set[str] = set()
    for cuts in range(1, 4):
        enough = cuts * JOBS // 5
        wait_for(partial(has_executed, book, enough), f"{enough} jobs executed")
        settled |= {item for item in executions(book) if jobs[int(item)].ready()}
        assert proxy.cut() > 0
        wait_for(partial(has_lost_its_broker, worker, cuts), "the cut was noticed")
        # Two cuts in a row would be noticed as one.
        wait_for(partial(has_reconnected, worker, cuts), "the worker is back")
    wait_for(
        lambda: not queue_length(redis_url) and not holds_any(worker),
        "queue and worker empty",
        TIMEOUT_S,
    )
    times = Counter(executions(book))
    # The broker hands nothing out without noting it, so a cut loses nothing.
    wait_for(lambda: all(job.ready() for job in jobs), "every job answered", TIMEOUT_S)
    assert set(map(int, times)) == set(range(JOBS))
    assert all(job.get(timeout=TIMEOUT_S) == number for number, job in enumerate(jobs))
    assert settled
    # Neither those that were settled nor those that ran or waited at a cut.
    assert set(times.values()) == {1}
    assert worker.devices() == [device]
    process = psutil.Process(worker.pid)
    wait_for(lambda: process.num_fds() <= descriptors + 10, "it has closed what was cut")

    def is_idle() -> bool:
        # What it burns in that time; at first it may still tidy up.
        return process.cpu_percent(interval=1) < 70

    wait_for(is_idle, "it burns no processor time")
    assert worker.stop(signal.SIGTERM) == 0


def has_executed(book: Path, items: int) -> bool:
    return len(set(executions(book))) >= items


def holds_any(worker: Worker) -> bool:
    """Whether the worker has jobs, running or waiting; or does not say, as it is reconnecting."""
    answers = [ask(ledger.app, command, [worker.name]) for command in ("active", "reserved")]
    return any(not answer or answer[worker.name] for answer in answers)


def has_reconnected(worker: Worker, times: int) -> bool:
    return worker.log.count("Connected to redis") > times


def has_lost_its_broker(worker: Worker, times: int) -> bool:
    return worker.log.count("Connection to broker lost") >= times
