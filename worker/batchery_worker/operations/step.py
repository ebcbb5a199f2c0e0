"""Opens the port of metrics and health beside a worker, where the settings ask for one."""

import logging
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from batchery.errors import StartError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery_worker.operations.watch import WorkerWatch

if TYPE_CHECKING:
    from batchery.operations.port import Port

_Step: Any = object if TYPE_CHECKING else bootsteps.StartStopStep

logger = logging.getLogger("batchery.worker")


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
