"""Cuts the connection to the broker, and takes the broker away, under a worker that is busy."""

import contextlib
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from apps import ledger
from apps.ledger import executions
from conftest import StartWorker
from support.harness import Worker, ask, queue_length, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)
JOBS = 2000


class Proxy:
    """Passes TCP connections on to a server, and cuts them when told to."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

    def cut(self) -> int:
        """Cuts every connection; returns how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        return len(pairs)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    port = urlsplit(redis_url).port
    assert port
    made = Proxy(port)
    yield made
    made.close()


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
    assert process.num_fds() <= descriptors + 10

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
