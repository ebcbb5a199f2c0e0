"""`batchery exporter`: metrics of the whole cluster, from Redis; alive where no worker is."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click
from celery import Celery

from batchery.cli.app import app_options, check_broker, load_app
from batchery.cli.console import Interrupt, broker_errors
from batchery.cli.stray_queues import StrayQueues
from batchery.cli.survey import FirstSeen, Survey, app_queues, survey
from batchery.errors import StartError
from batchery.operations.port import Port

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

#: How long workers may take to answer, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: How long a scrape waits for Redis, in seconds; Prometheus itself waits for ten.
SCRAPE_TIMEOUT_S = 4.0

#: The same for `/readyz`; kubelet waits for one second by default.
READY_TIMEOUT_S = 2.0

#: For how long a survey is shown again to those who ask next, in seconds.
FRESH_S = 1.0

NOT_INSTALLED = "batchery exporter: pip install 'batchery[metrics]'"

HELP = """Serve the metrics of all queues and workers to Prometheus.

Queues come from Redis alone: those of the app, those that workers consume, and those of --queues.
Jobs in all others are counted as strays: their queue may be misspelt.
Workers are asked for their figures where there are some. /readyz says whether Redis answers; while
it does not, batchery_broker_up is 0, and there is no metric of a queue.

\b
Exit codes:
  0  stopped by a signal
  2  could not start: no such app, or the address is taken
"""


class ClusterWatch:
    """Surveys the cluster when somebody asks, once for all who ask at the same time."""

    def __init__(
        self,
        take: Callable[[], Survey],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Surveys nothing yet.

        Args:
            take: Takes a survey; called on a thread of its own, as Redis may hang.
            clock: Seconds.
        """
        # Imported here, as other commands do without the extra `metrics`.
        from batchery.operations import families

        self._families = families
        self._take = take
        self._clock = clock
        self._first_seen = FirstSeen(clock)
        self._thread = ThreadPoolExecutor(1, "batchery-survey")
        self._lock = threading.Lock()
        self._running: Future[tuple[Survey, Sequence[Metric]]] | None = None
        self._began_s = 0.0
        self._totals = families.RunningTotals()
        self._problem = ""

    def _survey(self) -> "tuple[Survey, Sequence[Metric]]":
        """A survey, and all that its workers and those before them have counted."""
        survey = self._first_seen.date(self._take())
        return survey, list(self._totals.add(survey.figures))

    def _find_latest(self) -> "tuple[Survey | None, Sequence[Metric]]":
        """The survey of this moment; None if Redis does not answer in time."""
        with self._lock:
            now_s, running = self._clock(), self._running
            if running is None or (running.done() and now_s - self._began_s >= FRESH_S):
                self._began_s = now_s
                self._running = running = self._thread.submit(self._survey)
            left_s = max(0.0, self._began_s + SCRAPE_TIMEOUT_S - now_s)
        try:
            found = running.result(left_s)
        except Exception as error:  # noqa: BLE001 - whoever watches must see it, and see it mended
            self._log(str(error) or f"no answer in {SCRAPE_TIMEOUT_S:g} s")
            return None, ()
        self._log("")
        return found

    def _log(self, problem: str) -> None:
        """Logs what is wrong when it begins, and that it is over."""
        if bool(problem) != bool(self._problem):
            logger.warning("the cluster: %s", problem or "Redis answers again")
        self._problem = problem

    def encode(self, accept: str) -> tuple[bytes, str]:
        """The metrics, in a format that the caller reads."""
        return self._families.encode(self.collect(), accept)

    def collect(self) -> "Iterator[Metric]":
        """The metrics of this moment."""
        survey, totals = self._find_latest()
        families = self._families
        yield from families.collect_cluster(survey)
        yield from families.collect_aliases(survey)
        workers = {} if survey is None else survey.figures
        yield from totals
        yield from families.collect_workers(workers)
        yield from families.collect_devices(workers)


@click.command(help=HELP)
@app_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9465, help="Port; 0 is any free one."
)
@click.option("--queues", "names", metavar="A,B", default="", help="Other queues to look into.")
@click.option("--workers/--no-workers", default=True, help="Ask workers for their figures, too.")
def exporter(
    *,
    app_path: str,
    redis_url: str | None,
    host: str,
    port: int,
    names: str,
    workers: bool,
) -> None:
    """Runs the command; see `HELP`."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    app = load_app(app_path, redis_url, with_tasks=True)
    queues = app_queues(app) | {name for name in names.split(",") if name}
    serve(app, host, port, queues, asks=workers)


def serve(app: Celery, host: str, port: int, queues: Collection[str], *, asks: bool) -> None:
    """Serves until a signal comes.

    Args:
        app: Its broker is asked.
        host: Address to listen on.
        port: Port; 0 is any free one.
        queues: Names of queues that are looked into, whether a worker consumes them or not.
        asks: Whether workers are asked for their figures.

    Raises:
        StartError: The address is taken, or the extra `metrics` is not installed.
    """
    strays = StrayQueues(app)

    def take() -> Survey:
        found = survey(app, ANSWER_TIMEOUT_S, queues, asks=asks)
        with broker_errors():
            return replace(found, strays=strays.look(found.queues))

    try:
        watch = ClusterWatch(take)
    except ModuleNotFoundError as error:
        raise StartError(f"{NOT_INSTALLED} ({error})") from error
    listening = Port(host, port, watch.encode, lambda: "", partial(why_silent, app))
    with Interrupt(at_once=True), contextlib.suppress(KeyboardInterrupt):
        listening.start()
        click.echo(f"batchery exporter: {listening.url}/metrics")
        threading.Event().wait()
    listening.close()


def why_silent(app: Celery) -> str:
    """Why the broker does not answer; empty if it does."""
    # On a thread: Sentinels, and brokers other than Redis, may take longer.
    asking = ThreadPoolExecutor(1, "batchery-ready").submit(check_broker, app, READY_TIMEOUT_S)
    try:
        asking.result(READY_TIMEOUT_S)
    except (StartError, TimeoutError) as error:
        return str(error) or f"the broker does not answer within {READY_TIMEOUT_S:g} s"
    return ""
