"""What is seen of a worker: for its health, for its own port, and over remote control.

The port is opened beside a worker where the settings ask for one.
"""

import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchery.errors import StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.protocol.figures import HealthFigures, WorkerFigures, read_figures
from batchery.settings import MetricsSettings, Settings
from batchery.transport.membership import BEATS_PER_EXPIRY
from batchery_worker.device_pool.process import State
from batchery_worker.operations.health import DeviceSight, Verdict, WorkerSight, judge
from batchery_worker.remote_control import collect_figures

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from batchery.operations.port import Port

logger = logging.getLogger("batchery.worker")

#: How often the lag of the event loop is measured, in seconds; and how many times are remembered.
TICK_S = 1.0
MAX_TICKS = 15

#: How long the event loop may take to hand out figures, in seconds; then the last ones are shown.
ANSWER_TIMEOUT_S = 1.0


class WorkerWatch:
    """Looks at a worker; from any thread, unless a method says otherwise."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        self._worker = worker
        self._started_at_s = round(time(), 3)
        self._max_pass_s = settings.max_pass_s
        self._known: WorkerFigures | None = None
        self._lags_s: deque[float] = deque(maxlen=MAX_TICKS)
        self._ticked_s = 0.0

    def judge(self) -> Verdict:
        """Whether the worker is live, and ready."""
        pool, consumer = self._worker.pool, getattr(self._worker, "consumer", None)
        fleet = getattr(self._worker, "fleet", None)
        devices = getattr(pool, "devices", ()) if fleet is None else fleet.supervisor.devices
        sights = None
        if devices is not None:
            now_s = monotonic()
            sights = [
                DeviceSight(
                    *(each.name, each.state is State.READY, each.silent_s(now_s), each.is_hung)
                )
                for each in devices
            ]
        # Whoever reconnects has no connection for a while.
        channel = getattr(getattr(consumer, "task_consumer", None), "channel", None)
        is_connected = bool(
            channel is not None
            and consumer is not None
            and consumer.connection
            and consumer.blueprint.state == bootsteps.RUN  # type: ignore[attr-defined]
        )
        sight = WorkerSight(sights, is_connected, still_s=self._find_still_s())
        if fleet is not None:
            beats = fleet.beats
            sight = sight._replace(
                unheard_s=0.0 if beats.beat_s is None else monotonic() - beats.beat_s,
                beat_pause_s=beats.expiry_s / BEATS_PER_EXPIRY,
                is_silent=beats.is_silent,
            )
        return judge(sight, self._max_pass_s)

    def figures(self) -> dict[str, Any]:
        """What remote control answers besides the figures of the pool."""
        verdict = self.judge()
        leases: dict[str, Any] = {}
        if getattr(self._worker, "fleet", None) is None:
            leases["leases"] = None
        return {
            **leases,
            "health": asdict(self._build_health(verdict)),
            "loop_lag_s": self._find_lag_s(),
        }

    def _build_health(self, verdict: Verdict) -> HealthFigures:
        return HealthFigures(not verdict.not_live, not verdict.not_ready, self._started_at_s)

    def measure_lag(self, loop: Any) -> None:
        """Measures how late an event loop is, from now on; again after each reconnect."""
        self._ticked_s = monotonic()
        loop.call_repeatedly(TICK_S, self._tick)

    def _find_still_s(self) -> float:
        """For how long the event loop has stood still; 0 where nobody measures it."""
        return max(0.0, monotonic() - self._ticked_s - TICK_S) if self._ticked_s else 0.0

    def _find_lag_s(self) -> float | None:
        """How late the event loop was lately, or is now; None where nobody measures it."""
        return max((self._find_still_s(), *self._lags_s)) if self._ticked_s else None

    def _tick(self) -> None:
        now_s = monotonic()
        self._lags_s.append(max(0.0, now_s - self._ticked_s - TICK_S))
        self._ticked_s = now_s

    def open_port(self, settings: MetricsSettings) -> "Port":
        """The worker's port, which is to be started.

        Raises:
            StartError: The address is taken, or the extra `metrics` is not installed.
        """
        from batchery.operations.port import Port

        return Port(
            *(settings.host, settings.port or 0, self.collect),
            lambda: self.judge().not_live,
            lambda: self.judge().not_ready,
        )

    def collect(self) -> "Iterator[Metric]":
        """The worker's metrics; from any thread but that of the event loop."""
        # Imported here, as only those who have the extra `metrics` come here.
        from batchery.operations.families import collect_devices, collect_sums, collect_workers

        figures, verdict = self._ask(), self.judge()
        if figures is None:
            # The devices load their models, or there are none.
            nothing = {"devices": {}, "batches": {}, "clock_s": monotonic()}
            figures = read_figures({**nothing, **self.figures()})
            assert figures is not None
        figures.health, figures.loop_lag_s = self._build_health(verdict), self._find_lag_s()
        workers = {str(self._worker.hostname): figures}
        yield from collect_sums(figures.batches)
        yield from collect_workers(workers)
        yield from collect_devices(workers)

    def _ask(self) -> WorkerFigures | None:
        """The figures, from the event loop; the last ones if it does not answer in time."""
        if getattr(self._worker, "fleet", None) is not None:
            self._known = read_figures(collect_figures(self._worker.consumer) or {})
            return self._known
        if getattr(self._worker.pool, "devices", None) is None:
            return self._known
        answer: Future[dict[str, Any] | None] = Future()

        def collect() -> None:
            try:
                answer.set_result(collect_figures(self._worker.consumer))
            except Exception as error:  # noqa: BLE001 - whoever waits must not wait in vain
                answer.set_exception(error)

        self._worker.pool.deliver(collect)
        try:
            self._known = read_figures(answer.result(ANSWER_TIMEOUT_S) or {})
        except Exception as error:  # noqa: BLE001 - the counters must go on
            logger.debug("figures are old, as the event loop gives none: %r", error)
        return self._known


_Step: Any = object if TYPE_CHECKING else bootsteps.StartStopStep


class WatchStep(_Step):  # type: ignore[misc]
    """Beside a worker from before its models are loaded until its end."""

    requires = ("batchery_worker.bootstep:BatchStep",)

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a port that is taken ends the worker."""
        settings = get_installation(parent.app).settings
        self._watch = parent.watch = WorkerWatch(parent, settings)
        self._port: Port | None = None
        self._has_begun = False
        # The gateway's own worker has the settings of others, and would take their port.
        is_gateways = set(parent.app.amqp.queues.consume_from) == {JOBS_QUEUE}
        if settings.metrics.port is not None and not is_gateways:
            try:
                self._port = self._watch.open_port(settings.metrics)
            except StartError as error:
                logger.critical("%s", error)
                raise SystemExit(error.exit_code) from None
            logger.info("metrics and health: %s", self._port.url)
        parent.pool.on_forked = self._begin

    def start(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery once the pool has started; one with devices has called `_begin`."""
        self._begin()

    def _begin(self) -> None:
        """Starts a thread, which processes that are forked before must not inherit."""
        if self._port is not None and not self._has_begun:
            self._has_begun = True
            self._port.start()

    def register_with_event_loop(self, parent: Any, loop: Any) -> None:  # noqa: ARG002 - Celery's
        """Called by Celery with each event loop that is about to run."""
        if self._port is not None:
            self._watch.measure_lag(loop)
