"""What a gateway and the workers of its jobs have in common."""

from celery import Celery

from batchery.settings import Settings
from batchery_producer.gateway.batches.files import FileStore, Storage
from batchery_producer.gateway.batches.store import BatchStore
from batchery_producer.gateway.models import ServedModels
from batchery_producer.gateway.store import Store


class Shared:
    """The app, its models, and what is kept of files and batches."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        """Connects to nothing yet.

        Raises:
            DatasetError: There is no such place for files.
        """
        self.app, self.settings = app, settings
        self.models = ServedModels(settings.models)
        self.store = Store(app)
        self.files = FileStore(self.store, Storage(settings.gateway.files))
        self.batches = BatchStore(self.store, self.files)
