"""What the results of a built-in model depend on: which one it is, and how it is run."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.settings import ModelSettings
from batchery_worker.cache.keys import folder_digest
from batchery_worker.models.loading.source import ModelSource

#: Settings that say where the model is found, how its jobs are batched and how its results are
#: kept; none of them changes a result.
NEUTRAL = {
    *("model", "revision", "queue"),
    *("max_batch_size", "max_batch_tokens", "max_wait_ms"),
    *("cache", "cache_ttl_s", "cache_max_bytes"),
}

#: Code that computes; another version may compute something else.
PACKAGES = ("batchery", "torch", "transformers", "tokenizers")


def identity(settings: ModelSettings, source: ModelSource, run: dict[str, str], model: Any) -> str:
    """A text that is another one as soon as results may be others.

    Args:
        settings: Of the model.
        source: Where it was loaded from.
        run: How it is run, as it was decided: device, number format, forward pass.
        model: As transformers loaded it.

    Raises:
        OSError: Its files cannot be read.
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
