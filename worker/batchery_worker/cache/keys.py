"""Names of inputs: equal ones have one, no two others do, whoever computes it.

An input is what a result depends on: the item, the keywords, and the *version*, which stands for
whatever computes. Equal means: equal as JSON, in whatever order the keys of an object come.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchery_worker.ipc.values import is_plain

#: Bytes of a digest: no two of 2^64 inputs have the same one.
DIGEST_BYTES = 20

#: Changes whenever what is named or stored here gets another form.
KEY_FORMAT = 1

#: Weights in formats that are never loaded, and may be many gigabytes.
NEVER_LOADED = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite"}


def canonical(value: Any) -> bytes | None:
    """One spelling for all equal values; None for what JSON has no spelling for."""
    if type(value) is str:
        # The common item, which may be long: as it is.
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
    """The names of a batch's inputs, one per item, in order.

    Args:
        version: Of the results: the task's name, and what stands for its code and its model.
        keywords: Of the batch.
        items: As they were submitted.

    Returns:
        None for each item that has none: it can be equal to nothing.
    """
    shared = canonical({**keywords})
    if shared is None:
        return [None] * len(items)
    # The length keeps one part from passing for the end of the other.
    head = json.dumps([KEY_FORMAT, *version, len(shared)]).encode() + shared
    start = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    return [_digest(start, canonical(item)) for item in items]


def folder_digest(folder: Path) -> str:
    """A name for the files of a model: another one as soon as a byte of them is another.

    Reads all of them, about a second per gigabyte; hidden files and weights that are never loaded
    are passed over.

    Raises:
        OSError: One of them cannot be read.
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
