"""What a running gateway has, and what runs beside its requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from celery import Celery
from starlette.requests import Request

from batchery.settings import Settings
from batchery_producer.async_client import AsyncClient
from batchery_producer.gateway.batches.files import FileStore, Storage
from batchery_producer.gateway.batches.store import BatchStore
from batchery_producer.gateway.health import Absence, Health, Monitor
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.models import ModelInfos, ServedModels
from batchery_producer.gateway.store import Store, TaskRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What the routes share; `request.app.state.gateway`."""

    app: Celery
    settings: Settings
    models: ServedModels
    client: AsyncClient
    health: Health
    infos: ModelInfos
    files: FileStore
    batches: BatchStore
    store: Store
    task_records: TaskRecords
    stream_records: TaskRecords
    monitor: Monitor
    measurements: Measurements


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
    models = ServedModels(settings.models)
    queues = {model.queue for model in models}
    health = Health(app, Absence(queues, settings.gateway.worker_grace_s))
    store = Store(app)
    files = FileStore(store, Storage(settings.gateway.files))
    async with AsyncClient(app) as client:
        await health.look()
        watching = asyncio.create_task(health.watch())
        try:
            yield Gateway(
                app=app,
                settings=settings,
                models=models,
                client=client,
                health=health,
                infos=ModelInfos(),
                files=files,
                batches=BatchStore(store, files),
                store=store,
                task_records=TaskRecords(store),
                stream_records=TaskRecords(store, "stream"),
                monitor=Monitor(app, queues, health),
                measurements=measurements,
            )
        finally:
            watching.cancel()
