"""What a running gateway has, and what runs beside its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from celery import Celery
from starlette.requests import Request

from batchery.settings import Settings
from batchery_producer.async_client import AsyncClient
from batchery_producer.gateway.batches.shared import Shared
from batchery_producer.gateway.health import Health, Monitor
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.models import ModelInfos
from batchery_producer.gateway.store import TaskRecords


class Gateway(Shared):
    """What the routes share; `request.app.state.gateway`."""

    def __init__(self, app: Celery, settings: Settings, measurements: Measurements) -> None:
        """As `running` takes it."""
        super().__init__(app, settings)
        queues = {model.queue for model in self.models}
        self.measurements = measurements
        self.client = AsyncClient(app)
        self.health = Health(app, queues, settings.gateway.worker_grace_s)
        self.monitor = Monitor(app, queues, self.health)
        self.infos = ModelInfos()
        self.task_records = TaskRecords(self.store)
        self.stream_records = TaskRecords(self.store, "stream")


def get_gateway(request: Request) -> Gateway:
    """The gateway of a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


@asynccontextmanager
async def running(
    app: Celery, settings: Settings, measurements: Measurements
) -> AsyncIterator[Gateway]:
    """Runs a gateway while entered.

    Args:
        app: The Celery app to which jobs are sent.
        settings: Its models, and the table `gateway`.
        measurements: Where results are counted.
    """
    gateway = Gateway(app, settings, measurements)
    async with gateway.client:
        await gateway.health.look()
        watching = asyncio.create_task(gateway.health.watch())
        try:
            yield gateway
        finally:
            watching.cancel()
