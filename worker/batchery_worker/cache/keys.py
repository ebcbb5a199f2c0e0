"""Cache keys: digests of inputs. Equal inputs have the same digest, on every machine.

An input is everything that a result depends on: the item, the keywords, and the *version*, which
stands for code and model. Inputs are equal if they are equal as JSON, whatever the order of keys.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchery_worker.ipc.values import is_plain

#: Length of a digest, in bytes: no two of 2^64 inputs have the same one.
DIGEST_BYTES = 20

#: Version of keys and stored results; it changes whenever their form does.
KEY_FORMAT = 1

#: Suffixes of weights that are never loaded, and may have many gigabytes.
NEVER_LOADED = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite"}


def canonical(value: Any) -> bytes | None:
    """The same bytes for all equal values; None for a value that JSON cannot write."""
    if type(value) is str:
        # A text is the common item, and may be long, so it is not encoded as JSON.
        return b"s" + value.encode("utf-8", "surrogatepass")
    try:
        if not is_plain(value):
            return None
        return b"j" + json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (RecursionError, ValueError):
        return None


def digests(
    version: Sequence[str], keywords: Mapping[str, Any], items: Sequence[Any]
) -> list[bytes | None]:
    """The digests of a batch's inputs, one per item, in order.

    Args:
        version: Version of the results: the task's name, and what stands for its code and model.
        keywords: The keywords of the batch.
        items: The items as they were submitted.

    Returns:
        None for an item without a digest: it counts as equal to no other.
    """
    shared = canonical({**keywords})
    if shared is None:
        return [None] * len(items)
    # The length separates the parts: the end of one cannot look like the start of the next.
    head = json.dumps([KEY_FORMAT, *version, len(shared)]).encode() + shared
    start = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    return [_digest(start, canonical(item)) for item in items]


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


def _digest(start: Any, item: bytes | None) -> bytes | None:
    if item is None:
        return None
    own = start.copy()
    own.update(item)
    digest: bytes = own.digest()
    return digest
