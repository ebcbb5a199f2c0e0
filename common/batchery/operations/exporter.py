"""`batchery exporter`: metrics of queues, from Redis alone; alive where no worker is."""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import click

from batchery.cli.app import app_options, load_app
from batchery.cli.survey import Survey, app_queues, survey

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

#: How long a scrape waits for Redis, in seconds; Prometheus itself waits for ten.
SCRAPE_TIMEOUT_S = 4.0

#: The same for `/readyz`.
READY_TIMEOUT_S = 2.0

#: For how long a survey is shown again to those who ask next, in seconds: the gateway's page asks
#: once a second.
FRESH_S = 0.75


@click.command()
@app_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9465, help="Port; 0 is any free one."
)
@click.option("--queues", "names", metavar="A,B", default="", help="Other queues to look into.")
def exporter(*, app_path: str, redis_url: str | None, host: str, port: int, names: str) -> None:
    """Serve the metrics of all queues to Prometheus; workers have ports of their own.

    Queues come from Redis alone: those of the app, those that workers consume, and those of
    --queues. /readyz says whether Redis answers; while it does not, batchery_broker_up is 0, and
    there is no metric of a queue.

    \b
    Exit codes:
      0  stopped by a signal
      2  could not start: no such app, or the address is taken
    """  # noqa: D301 (click looks for this character)
    from batchery.operations.port import Port

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    app = load_app(app_path, redis_url, with_tasks=True)
    queues = app_queues(app) | {name for name in names.split(",") if name}
    watch = ClusterWatch(partial(survey, app, queues=queues, asks=False))
    listening = Port(host, port, watch.collect, lambda: "", watch.find_problem)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        listening.start()
        click.echo(f"batchery exporter: {listening.url}/metrics")
        threading.Event().wait()


class ClusterWatch:
    """Surveys the cluster when somebody asks, once for all who ask at the same time."""

    def __init__(self, take: Callable[[], Survey]) -> None:
        """Surveys nothing yet; `take` is called on a thread of its own, as Redis may hang."""
        self._take = take
        self._thread = ThreadPoolExecutor(1, "batchery-survey")
        self._lock = threading.Lock()
        self._running: Future[Survey] | None = None
        self._began_s = 0.0
        self._problem = ""

    def ask(self) -> Future[Survey]:
        """The survey of this moment, which may be under way."""
        with self._lock:
            running = self._running
            if running is None or (running.done() and monotonic() - self._began_s >= FRESH_S):
                self._began_s = monotonic()
                running = self._thread.submit(self._take)
                self._running = running
        return running

    def collect(self) -> "Iterator[Metric]":
        """The metrics of this moment."""
        from batchery.operations.families import collect_cluster

        yield from collect_cluster(self._find_latest(SCRAPE_TIMEOUT_S))

    def find_problem(self) -> str:
        """Why nothing is known of the cluster; empty if it is."""
        return "" if self._find_latest(READY_TIMEOUT_S) else self._problem

    def _find_latest(self, timeout_s: float) -> Survey | None:
        """The survey of this moment; None if Redis does not answer in time."""
        try:
            found = self.ask().result(timeout_s)
        except Exception as error:  # noqa: BLE001 - whoever watches must see it, and see it mended
            self._log(str(error) or "the broker does not answer")
            return None
        self._log("")
        return found

    def _log(self, problem: str) -> None:
        """Logs what is wrong when it begins, and that it is over."""
        if bool(problem) != bool(self._problem):
            logger.warning("the cluster: %s", problem or "Redis answers again")
        self._problem = problem
