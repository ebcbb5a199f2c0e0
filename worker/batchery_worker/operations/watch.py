"""What is seen of a worker: for its health, for its own port, and over remote control.

The port is opened beside a worker where the settings ask for one.

Ready is a worker that takes jobs and can run them. Live is one that a restart would not help. So a
Redis that is away makes a worker not ready at once, and not live only after ten minutes: a fresh
worker could do no more than wait, and would load its models first. A device that hangs makes it not
live until its replacement is ready. The worker sees to that by itself: `device_pool/` kills the
device, and its jobs run again.
"""

import logging
from collections.abc import Iterator, Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchery.errors import StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.protocol.figures import BatchFigures, HealthFigures, WorkerFigures, read_figures
from batchery.settings import Settings
from batchery.transport.membership import BEATS_PER_EXPIRY
from batchery_worker.device_pool.process import State
from batchery_worker.remote_control import collect_figures

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from batchery.operations.port import Port

logger = logging.getLogger("batchery.worker")

#: Heartbeats that may be missing, in their usual pauses, before Redis counts as lost.
MAX_MISSED_BEATS = 3

#: After so much time without Redis a worker is not live, in seconds.
REDIS_GRACE_S = 600.0


class WorkerWatch:
    """Looks at a worker; from any thread, unless a method says otherwise."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        self._worker = worker
        self._started_at_s = round(time(), 3)
        self._max_pass_s = settings.max_pass_s

    def judge(self) -> tuple[str, str]:
        """Why the worker is not live, and why it is not ready; empty if it is."""
        fleet = self._worker.fleet
        not_live, not_ready = self._judge_devices(fleet.devices if fleet is not None else ())
        if not self._is_connected():
            not_ready.append("the worker does not consume its queues")
        if fleet is not None and (beats := fleet.holding.serving) is not None:
            unheard_s = 0.0 if beats.beat_s is None else monotonic() - beats.beat_s
            if unheard_s > REDIS_GRACE_S:
                not_live.append(f"Redis has not answered for {unheard_s:.0f} s")
            if beats.is_silent or unheard_s > MAX_MISSED_BEATS * beats.expiry_s / BEATS_PER_EXPIRY:
                not_ready.append("Redis does not answer")
        return "; ".join(not_live), "; ".join(not_live or not_ready)

    def _judge_devices(self, devices: Sequence[Any]) -> tuple[list[str], list[str]]:
        not_live, now_s = list[str](), monotonic()
        for each in devices:
            silent_s = each.silent_s(now_s)
            if each.is_hung:
                not_live.append(f"device {each.name} hung, and is being replaced")
            elif self._max_pass_s is not None and silent_s > self._max_pass_s:
                silence = f"gave no sign for {silent_s:.1f} s"
                not_live.append(f"device {each.name} has work, and {silence}")
        waiting = [each for each in devices if each.state is not State.READY]
        return not_live, [f"device {each.name} is not ready" for each in waiting]

    def _is_connected(self) -> bool:
        consumer = getattr(self._worker, "consumer", None)
        # Whoever reconnects has no connection for a while.
        channel = getattr(getattr(consumer, "task_consumer", None), "channel", None)
        return bool(
            channel is not None
            and consumer is not None
            and consumer.connection
            and consumer.blueprint.state == bootsteps.RUN  # type: ignore[attr-defined]
        )

    def check_health(self) -> HealthFigures:
        """What remote control and the metrics say of it."""
        not_live, not_ready = self.judge()
        return HealthFigures(not not_live, not not_ready, self._started_at_s)

    def collect(self) -> "Iterator[Metric]":
        """The worker's metrics; from any thread but that of the event loop."""
        # Imported here, as only those who have the extra `metrics` come here.
        from batchery.operations.families import collect_devices, collect_sums, collect_workers

        figures = None
        if self._worker.fleet is not None:
            figures = read_figures(collect_figures(self._worker.consumer) or {})
        if figures is None:
            # The devices load their models, or there are none.
            figures = WorkerFigures({}, BatchFigures(), monotonic(), health=self.check_health())
        workers = {str(self._worker.hostname): figures}
        yield from collect_sums(figures.batches)
        yield from collect_workers(workers)
        yield from collect_devices(workers)


_Step: Any = object if TYPE_CHECKING else bootsteps.StartStopStep


class WatchStep(_Step):  # type: ignore[misc]
    """Beside a worker from before its models are loaded until its end."""

    requires = ("batchery_worker.bootstep:BatchStep",)

    _port: "Port | None" = None

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`; a port that is taken ends the worker."""
        settings = get_installation(parent.app).settings
        self._watch = parent.watch = WorkerWatch(parent, settings)
        # The gateway's own worker has the settings of others, and would take their port.
        is_gateways = set(parent.app.amqp.queues.consume_from) == {JOBS_QUEUE}
        if settings.metrics.port is not None and not is_gateways:
            try:
                # It needs the extra `metrics`.
                from batchery.operations.port import Port

                self._port = Port(
                    *(settings.metrics.host, settings.metrics.port, self._watch.collect),
                    lambda: self._watch.judge()[0],
                    lambda: self._watch.judge()[1],
                )
            except StartError as error:
                logger.critical("%s", error)
                raise SystemExit(error.exit_code) from None
            logger.info("metrics and health: %s", self._port.url)

    def start(self, parent: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Called by Celery once the pool has started: its processes must not inherit a thread."""
        if self._port is not None:
            self._port.start()
