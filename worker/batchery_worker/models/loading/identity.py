"""What the results of a built-in model depend on: the model, and how it is run."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.settings import ModelSettings
from batchery_worker.models.loading.source import ModelSource
from batchery_worker.result_cache import DIGEST_BYTES

#: Settings that never change a result: where the model is, and how its jobs are batched and cached.
NEUTRAL = {
    *("model", "revision", "queue"),
    *("max_batch_size", "max_batch_tokens", "max_wait_ms"),
    *("target_latency_ms", "small_batch_threshold"),
    *("cache", "cache_ttl_s", "cache_max_bytes"),
}

#: Suffixes of weights that are never loaded, and may have many gigabytes.
NEVER_LOADED = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite"}

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


def folder_digest(folder: Path) -> str:
    """A digest of a model's files, which changes with every byte.

    It reads all files, about a second per gigabyte, except hidden ones and weights that are never
    loaded.

    Raises:
        OSError: A file cannot be read.
    """
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or path.suffix in NEVER_LOADED or not path.is_file():
            continue
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").hexdigest()
        whole.update(f"{name.as_posix()}\0{content}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def _snapshot(source: ModelSource) -> Path:
    """The folder of the hub's cache with the files of one commit."""
    config = source.path("config.json")
    if config is None:
        raise FileNotFoundError(f"model {source.name!r}: its files are not found any more")
    return config.parent
