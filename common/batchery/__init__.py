"""Batched GPU inference for Celery and Redis: this is the public door.

```python
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("shop", broker="redis://", backend="redis://"))

@app.task(base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]
```
"""

from batchery.errors import (
    AppNotImportable,
    BatchArgumentError,
    BatcheryError,
    BrokerRefused,
    DatasetError,
    DeviceDied,
    DeviceUnavailable,
    InvalidItem,
    ItemError,
    ItemFailed,
    ModelLoadError,
    NoResult,
    OutOfMemory,
    PublishError,
    QueueFull,
    RedisUnavailable,
    SettingsError,
    StartError,
    UnserialisableResult,
    WrongLength,
)
from batchery.install import install, register
from batchery.model import Model
from batchery.outcomes import Failed, Ignore, Reject, Replace, RetryAfter
from batchery.results import Classification, Embedding, to_numpy
from batchery.settings import ModelSettings, Settings
from batchery.task import BatchTask

__all__ = [
    "AppNotImportable",
    "BatchArgumentError",
    "BatchTask",
    "BatcheryError",
    "BrokerRefused",
    "Classification",
    "DatasetError",
    "DeviceDied",
    "DeviceUnavailable",
    "Embedding",
    "Failed",
    "Ignore",
    "InvalidItem",
    "ItemError",
    "ItemFailed",
    "Model",
    "ModelLoadError",
    "ModelSettings",
    "NoResult",
    "OutOfMemory",
    "PublishError",
    "QueueFull",
    "RedisUnavailable",
    "Reject",
    "Replace",
    "RetryAfter",
    "Settings",
    "SettingsError",
    "StartError",
    "UnserialisableResult",
    "WrongLength",
    "install",
    "register",
    "to_numpy",
]
