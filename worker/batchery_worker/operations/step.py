"""Switches on what the settings ask for: the port, the file for node_exporter, word to systemd."""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchery.errors import StartError
from batchery.fork_gate import fork_gate
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.metrics_settings import MetricsSettings
from batchery_worker.operations import systemd
from batchery_worker.operations.watch import WorkerWatch

_Step: Any = object if TYPE_CHECKING else bootsteps.StartStopStep

logger = logging.getLogger("batchery.worker")

#: How often the file for node_exporter is written, in seconds.
TEXTFILE_PAUSE_S = 15.0

#: How often it is looked whether the worker is ready by now, in seconds.
READY_PAUSE_S = 0.5

#: Words to systemd before its watchdog would bite; one may come late.
WORDS_PER_WATCHDOG = 3


class WatchStep(_Step):  # type: ignore[misc]
    """Beside a worker from before its models are loaded until its end."""

    requires = ("batchery_worker.bootstep:BatchStep",)

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a port that is taken ends the worker."""
        settings = get_installation(parent.app).settings
        self._watch = parent.watch = WorkerWatch(parent, settings)
        self._waiting: list[Any] = []
        # The gateway's own worker has the settings of others, and would take their port.
        if set(parent.app.amqp.queues.consume_from) != {JOBS_QUEUE}:
            try:
                self._waiting = make_parts(self._watch, settings.metrics)
            except StartError as error:
                logger.critical("%s", error)
                raise SystemExit(error.exit_code) from None
        self._parts = tuple(self._waiting)
        parent.pool.on_forked = self._begin

    def start(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery once the pool has started; one with devices has called `_begin`."""
        self._begin()

    def _begin(self) -> None:
        """Starts threads, which processes that are forked before must not inherit."""
        while self._waiting:
            self._waiting.pop().start()

    def register_with_event_loop(self, parent: Any, loop: Any) -> None:  # noqa: ARG002 - Celery's
        """Called by Celery with each event loop that is about to run."""
        if self._parts:
            self._watch.measure_lag(loop)

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery at a warm shutdown, before the pool is stopped."""
        if self._parts:
            with suppress(OSError):
                systemd.notify("STOPPING=1")

    def terminate(self, parent: Any) -> None:
        """Called by Celery at a cold shutdown."""
        self.stop(parent)


def make_parts(watch: WorkerWatch, settings: MetricsSettings) -> list[Any]:
    """What the settings, and systemd, ask for; each is to be started.

    Raises:
        StartError: The address is taken, or what it needs is not installed.
    """
    parts: list[Any] = []
    textfile: Textfile | None = None
    if settings.port is not None or settings.textfile is not None:
        try:
            from batchery.operations import families
            from batchery.operations.port import Port
        except ModuleNotFoundError as error:
            raise StartError(f"metrics: pip install 'batchery[metrics]' ({error})") from error
        if settings.port is not None:
            port = Port(
                *(settings.host, settings.port),
                lambda accept: families.encode(watch.collect(), accept),
                lambda: watch.judge().not_live,
                lambda: watch.judge().not_ready,
            )
            logger.info("metrics and health: %s", port.url)
            parts.append(port)
        if (path := settings.textfile) is not None:
            textfile = Textfile(path, lambda: families.write_textfile(path, watch.collect()))
    if textfile is not None or systemd.is_listening():
        parts.append(Beats(watch, textfile))
    return parts


class Textfile:
    """The file for node_exporter: it must not say for ever how a worker was that has ended."""

    def __init__(self, path: str, write: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._lock = threading.Lock()
        self._has_ended = False

    def write(self) -> None:
        """Writes it, unless the worker has ended."""
        with self._lock:
            if not self._has_ended:
                self._write()

    def remove(self) -> None:
        """Removes it for good, as its worker ends."""
        with self._lock, suppress(OSError):
            self._has_ended = True
            os.unlink(self._path)


class Beats:
    """A thread that tells systemd how the worker is, and writes the file for node_exporter."""

    def __init__(self, watch: WorkerWatch, textfile: Textfile | None) -> None:
        self._watch = watch
        self._textfile = textfile
        watchdog_s = systemd.read_watchdog_s() or float("inf")
        self._pause_s = min(TEXTFILE_PAUSE_S, watchdog_s / WORDS_PER_WATCHDOG)
        self._said_ready = not systemd.is_listening()
        self._due_s = 0.0

    def start(self) -> None:
        """Starts the thread."""
        if self._textfile is not None:
            # Later than any step is stopped: a warm shutdown goes on as long as its batches.
            atexit.register(self._textfile.remove)
        threading.Thread(target=self._run, name="batchery-beats", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._pause_s if self._said_ready else READY_PAUSE_S):
            try:
                with fork_gate.working():
                    self.beat(monotonic())
            except Exception:
                logger.exception("systemd or the file of metrics cannot be told")

    def beat(self, now_s: float) -> None:
        """Tells once; `now_s` is monotonic time in seconds."""
        verdict = self._watch.judge()
        if not verdict.not_ready and not self._said_ready:
            systemd.notify("READY=1")
            self._said_ready = True
        if not verdict.not_live:
            systemd.notify("WATCHDOG=1")
        if self._textfile is not None and now_s >= self._due_s:
            self._due_s = now_s + TEXTFILE_PAUSE_S
            self._textfile.write()
