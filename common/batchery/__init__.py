"""Batched GPU inference for Celery and Redis: this is the public door.

```python
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("shop", broker="redis://", backend="redis://"))

@app.task(base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]
```

Errors aside, each name loads its module when it is first used: an app that only declares tasks does
not pay for the clients, and a program that only batches its own calls loads no Celery.
"""

import importlib
from typing import TYPE_CHECKING, Any

from batchery.errors import (
    AppNotImportable,
    BatchArgumentError,
    BatcherClosed,
    BatcheryError,
    BrokerRefused,
    DatasetError,
    DeadlineExceeded,
    DeviceDied,
    DeviceUnavailable,
    GaveUp,
    InvalidItem,
    ItemError,
    ItemFailed,
    ModelLoadError,
    NoResult,
    OutOfMemory,
    PromptTooLong,
    PublishError,
    QueueFull,
    RedisUnavailable,
    ServerBusy,
    ServerFailed,
    ServerRefused,
    SettingsError,
    StartError,
    UnknownJob,
    UnserialisableResult,
    WrongLength,
)

if TYPE_CHECKING:
    from batchery.installer import install, register
    from batchery.model import Advance, Model, StepModel
    from batchery.outcomes import Failed, Ignore, Partial, Reject, Replace, RetryAfter
    from batchery.results import (
        Classification,
        Embedding,
        Entity,
        Generation,
        MultiVectorEmbedding,
        Score,
        SparseEmbedding,
        TokenClassification,
        to_numpy,
    )
    from batchery.settings import ModelSettings, Settings
    from batchery.task import BatchTask
    from batchery.transport.dead_letters import DeadLetter, DeadLetters
    from batchery_producer import (
        AsyncClient,
        AsyncPieceStream,
        AsyncTask,
        Client,
        Ending,
        Outcome,
        PieceStream,
        Progress,
        Publisher,
        Snapshot,
        SubmitOptions,
        Summary,
        TaskClient,
        submit_file,
    )
    from batchery_worker.inprocess.batcher import Batcher, batched
    from batchery_worker.inprocess.engine import Engine

__all__ = [
    "Advance",
    "AppNotImportable",
    "AsyncClient",
    "AsyncPieceStream",
    "AsyncTask",
    "BatchArgumentError",
    "BatchTask",
    "Batcher",
    "BatcherClosed",
    "BatcheryError",
    "BrokerRefused",
    "Classification",
    "Client",
    "DatasetError",
    "DeadLetter",
    "DeadLetters",
    "DeadlineExceeded",
    "DeviceDied",
    "DeviceUnavailable",
    "Embedding",
    "Ending",
    "Engine",
    "Entity",
    "Failed",
    "GaveUp",
    "Generation",
    "Ignore",
    "InvalidItem",
    "ItemError",
    "ItemFailed",
    "Model",
    "ModelLoadError",
    "ModelSettings",
    "MultiVectorEmbedding",
    "NoResult",
    "OutOfMemory",
    "Outcome",
    "Partial",
    "PieceStream",
    "Progress",
    "PromptTooLong",
    "PublishError",
    "Publisher",
    "QueueFull",
    "RedisUnavailable",
    "Reject",
    "Replace",
    "RetryAfter",
    "Score",
    "ServerBusy",
    "ServerFailed",
    "ServerRefused",
    "Settings",
    "SettingsError",
    "Snapshot",
    "SparseEmbedding",
    "StartError",
    "StepModel",
    "SubmitOptions",
    "Summary",
    "TaskClient",
    "TokenClassification",
    "UnknownJob",
    "UnserialisableResult",
    "WrongLength",
    "batched",
    "install",
    "register",
    "submit_file",
    "to_numpy",
]

#: Modules of the names, which load when they are first used.
_MODULES = {
    **dict.fromkeys(__all__, "batchery_producer"),
    **dict.fromkeys(
        ("Failed", "Ignore", "Partial", "Reject", "Replace", "RetryAfter"), "batchery.outcomes"
    ),
    **dict.fromkeys(
        (
            "Classification",
            "Embedding",
            "Entity",
            "Generation",
            "MultiVectorEmbedding",
            "Score",
            "SparseEmbedding",
            "TokenClassification",
            "to_numpy",
        ),
        "batchery.results",
    ),
    **dict.fromkeys(("DeadLetter", "DeadLetters"), "batchery.transport.dead_letters"),
    **dict.fromkeys(("ModelSettings", "Settings"), "batchery.settings"),
    **dict.fromkeys(("install", "register"), "batchery.installer"),
    **dict.fromkeys(("Batcher", "batched"), "batchery_worker.inprocess.batcher"),
    "BatchTask": "batchery.task",
    "Engine": "batchery_worker.inprocess.engine",
    **dict.fromkeys(("Advance", "Model", "StepModel"), "batchery.model"),
}


def __getattr__(name: str) -> Any:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
