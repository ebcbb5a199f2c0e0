"""Switches on what the settings ask for: the port, the file for node_exporter, word to systemd."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchery.errors import StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.metrics_settings import MetricsSettings
from batchery_worker.operations import systemd
from batchery_worker.operations.watch import WorkerWatch

if TYPE_CHECKING:
    _Step: Any

    from batchery.operations.port import Port
else:
    _Step = bootsteps.StartStopStep

logger = logging.getLogger("batchery.worker")

#: How often the file for node_exporter is written, in seconds.
TEXTFILE_PAUSE_S = 15.0

#: How often it is looked whether the worker is ready by now, in seconds.
READY_PAUSE_S = 0.5

#: Words to systemd before its watchdog would bite; one may come late.
WORDS_PER_WATCHDOG = 3

NOT_INSTALLED = "[metrics] of the settings: pip install 'batchery[metrics]'"


class WatchStep(_Step):  # type: ignore[misc]
    """Beside a worker from before its models are loaded until its end."""

    # After it there are devices in the pool; of which this starts nothing.
    requires = ("batchery_worker.bootstep:BatchStep",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._watch: WorkerWatch | None = None
        self._port: Port | None = None
        self._beats: Beats | None = None

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a port that is taken ends the worker."""
        settings = get_installation(parent.app).settings
        self._watch = parent.watch = WorkerWatch(parent, settings)
        if set(parent.app.amqp.queues.consume_from) == {JOBS_QUEUE}:
            # The gateway's own worker has the settings of others, and would take their port.
            return
        try:
            if settings.metrics.port is not None:
                self._port = open_port(self._watch, settings.metrics)
            if settings.metrics.textfile or systemd.is_listening():
                self._beats = Beats(self._watch, settings.metrics.textfile)
        except StartError as error:
            logger.critical("%s", error)
            raise SystemExit(error.exit_code) from None
        parent.pool.on_forked = self._begin

    def start(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery once the pool has started; a pool without devices does not call us."""
        self._begin()

    def _begin(self) -> None:
        """Starts threads, which processes that are forked before must not inherit."""
        for each in (self._port, self._beats):
            if each is not None and not each.is_started:
                each.start()

    def register_with_event_loop(self, parent: Any, loop: Any) -> None:  # noqa: ARG002 - Celery's
        """Called by Celery with each event loop that is about to run."""
        if self._watch is not None and (self._port is not None or self._beats is not None):
            self._watch.measure_lag(loop)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery at a warm shutdown, before the pool is stopped."""
        if self._beats is not None:
            self._beats.stop()

    def terminate(self, parent: Any) -> None:
        """Called by Celery at a cold shutdown."""
        self.stop(parent)


def open_port(watch: WorkerWatch, settings: MetricsSettings) -> "Port":
    """Listens on the worker's own port.

    Raises:
        StartError: The address is taken, or what it needs is not installed.
    """
    encode = _load_families().encode
    from batchery.operations.port import Port

    assert settings.port is not None
    port = Port(
        settings.host,
        settings.port,
        lambda accept: encode(watch.collect(), accept),
        lambda: watch.judge().not_live,
        lambda: watch.judge().not_ready,
    )
    logger.info("metrics and health: %s", port.url)
    return port


def _load_families() -> Any:
    """The module that makes metrics. Raises StartError: what it needs is not installed."""
    try:
        from batchery.operations import families
    except ModuleNotFoundError as error:
        raise StartError(f"{NOT_INSTALLED} ({error})") from error
    return families


class Beats:
    """A thread that tells systemd how the worker is, and writes the file for node_exporter."""

    def __init__(self, watch: WorkerWatch, textfile: str | None) -> None:
        """Starts nothing.

        Raises:
            StartError: The file is wanted, and what it needs is not installed.
        """
        self._watch = watch
        self._write: Callable[..., None] | None = None
        self._textfile = textfile
        if textfile is not None:
            self._write = _load_families().write_textfile
        watchdog_s = systemd.read_watchdog_s()
        self._pause_s = min(TEXTFILE_PAUSE_S, (watchdog_s or float("inf")) / WORDS_PER_WATCHDOG)
        self._said_ready = not systemd.is_listening()
        self._due_s = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchery-beats", daemon=True)

    @property
    def is_started(self) -> bool:
        """Whether its thread was started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; returns at once."""
        self._stopped.set()
        with suppress(OSError):
            systemd.notify("STOPPING=1")

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_s if self._said_ready else READY_PAUSE_S):
            try:
                self._beat(monotonic())
            except Exception:
                logger.exception("systemd or the file of metrics cannot be told")

    def _beat(self, now_s: float) -> None:
        verdict = self._watch.judge()
        if not verdict.not_ready and not self._said_ready:
            systemd.notify("READY=1")
            self._said_ready = True
        if not verdict.not_live:
            systemd.notify("WATCHDOG=1")
        if self._write is not None and now_s >= self._due_s:
            self._due_s = now_s + TEXTFILE_PAUSE_S
            self._write(self._textfile, self._watch.collect())
