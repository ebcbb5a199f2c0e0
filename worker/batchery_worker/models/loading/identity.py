"""What the results of a built-in model depend on: the model, and how it is run."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.settings import ModelSettings
from batchery_worker.cache.keys import folder_digest
from batchery_worker.models.loading.source import ModelSource

#: Settings that never change a result: where the model is, and how its jobs are batched and cached.
NEUTRAL = {
    *("model", "revision", "queue"),
    *("max_batch_size", "max_batch_tokens", "max_wait_ms"),
    *("target_latency_ms", "small_batch_threshold"),
    *("cache", "cache_ttl_s", "cache_max_bytes"),
}

#: Packages whose versions may change a result.
PACKAGES = ("batchery", "torch", "transformers", "tokenizers")


def identity(settings: ModelSettings, source: ModelSource, run: dict[str, str], model: Any) -> str:
    """A text that changes whenever results may change.

    Args:
        settings: The model's settings.
        source: Where the model comes from.
        run: The chosen device, number format and forward pass.
        model: The model of transformers.

    Raises:
        OSError: The model's files cannot be read.
    """
    commit = getattr(model.config, "_commit_hash", None)
    if source.folder is not None:
        files = folder_digest(source.folder)
    elif commit:
        files = f"{source.name}@{commit}"
    else:
        files = folder_digest(_snapshot(source))
    packages = PACKAGES if settings.quantize == "none" else (*PACKAGES, "torchao")
    known = {
        "files": files,
        "settings": settings.model_dump(mode="json", exclude=NEUTRAL),
        "run": run,
        "versions": {name: version(name) for name in packages},
    }
    return json.dumps(known, sort_keys=True)


def _snapshot(source: ModelSource) -> Path:
    """The folder of the hub's cache with the files of one commit."""
    config = source.path("config.json")
    if config is None:
        raise FileNotFoundError(f"model {source.name!r}: its files are not found any more")
    return config.parent
