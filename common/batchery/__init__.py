"""Batched GPU inference for Celery and Redis: this is the public door.

```python
from celery import Celery
from batchery import BatchTask, install

app = install(Celery("shop", broker="redis://", backend="redis://"))

@app.task(base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]
```

Each name loads its module when it is first used: an app that only declares tasks does not pay for
the clients, and a program that only batches its own calls loads no Celery. Type checkers read
`__init__.pyi`.
"""

import importlib
from typing import Any

#: Where the public names are.
_MODULES = {
    "batchery.errors": """
        AppNotImportable BatchArgumentError BatcherClosed BatcheryError BrokerRefused DatasetError
        DeadlineExceeded DeviceDied DeviceUnavailable GaveUp InvalidItem ItemError ItemFailed
        ModelLoadError NoResult OutOfMemory PromptTooLong PublishError QueueFull RedisUnavailable
        ServerBusy ServerFailed ServerRefused SettingsError StartError UnknownJob
        UnserialisableResult WrongLength
    """,
    "batchery.installer": "install register",
    "batchery.model": "Advance Model StepModel",
    "batchery.outcomes": "Failed Ignore Partial Reject Replace RetryAfter",
    "batchery.results": """
        Classification Detection Embedding Generation MultiVectorEmbedding Score SparseEmbedding
        Transcription to_numpy
    """,
    "batchery.settings": "ModelSettings Settings",
    "batchery.task": "BatchTask",
    "batchery.transport.dead_letters": "DeadLetter DeadLetters",
    "batchery_producer": """
        AsyncClient AsyncPieceStream AsyncTask Client Ending Outcome PieceStream
        Publisher Snapshot SubmitOptions Summary TaskClient put_media submit_file
    """,
    "batchery_worker.inprocess.batcher": "batched",
    "batchery_worker.inprocess.engine": "Engine",
}

_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_PLACES)  # noqa: PLE0605 (from the one table)


def __getattr__(name: str) -> Any:
    if (module := _PLACES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
