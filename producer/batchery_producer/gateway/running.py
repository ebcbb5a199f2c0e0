"""What a running gateway has, and what runs beside its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from celery import Celery
from starlette.requests import Request

from batchery.settings import Settings
from batchery_producer.async_client import AsyncClient
from batchery_producer.gateway.batches.files import FileStore, Storage
from batchery_producer.gateway.batches.store import BatchStore
from batchery_producer.gateway.health import Health, Monitor
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.models import ServedModels
from batchery_producer.gateway.store import Store, TaskRecords


class Gateway:
    """What the routes share, and what runs batches; `request.state.gateway`."""

    def __init__(self, app: Celery, settings: Settings, measurements: Measurements) -> None:
        """As `running` takes it; connects to nothing yet.

        Raises:
            DatasetError: There is no such place for files.
        """
        self.app, self.settings = app, settings
        self.models = ServedModels(settings.models)
        self.store = Store(app)
        self.files = FileStore(self.store, Storage(settings.gateway.files))
        self.batches = BatchStore(self.store, self.files)
        queues = {model.queue for model in self.models}
        self.measurements = measurements
        self.client = AsyncClient(app)
        self.health = Health(app, queues, settings.gateway.worker_grace_s)
        self.monitor = Monitor(app, queues, self.health)
        self.task_records = TaskRecords(self.store)
        self.stream_records = TaskRecords(self.store, "stream")


def get_gateway(request: Request) -> Gateway:
    """The gateway of a request."""
    gateway: Gateway = request.state.gateway
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
