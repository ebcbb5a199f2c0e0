"""How much memory a model will need, from its files and their tables of contents."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path

from batchery.settings import ModelSettings

#: Engine onnx: where the file of a model is, if no setting says so, as sentence-transformers and as
#: optimum write it.
ONNX_FILES = ("onnx/model.onnx", "model.onnx")

#: Files with the weights of a model; only those of the first pattern that fits are loaded. Others
#: beside them have the same weights in another form, as `consolidated.safetensors` of Mistral has.
WEIGHTS_FILES = ("model.safetensors", "model-*.safetensors", "*.safetensors")

#: Ends of the names of files beside it, which have its weights where they are large.
ONNX_WEIGHTS = ("_data", ".data")

#: Bytes of a weight in memory, by the setting `dtype`.
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Longest table of contents of a file that is read; one of a model with 100,000 weights has less.
MAX_TABLE_BYTES = 100_000_000


def estimate_bytes(settings: ModelSettings | None, device: str) -> int | None:
    """Estimates the memory of a model's weights before any of it is loaded.

    The weights of an ONNX file are in memory as they are in the file.

    Args:
        settings: Of the model; None if it has none.
        device: As torch spells it.

    Returns:
        None where the files are not here, or cannot be understood: whoever loads them will say why.
    """
    if settings is None:
        return None
    usual = 2 if device.startswith("cuda") else 4
    try:
        folder = _find_folder(settings)
        if folder is None:
            return None
        if settings.engine == "onnx":
            files = find_onnx_files(settings.onnx_file, partial(_find_file, folder))
            return sum_file_bytes(files) or None
        found = map(sorted, map(folder.glob, WEIGHTS_FILES))
        numbers = [count_weights(path) for path in next(filter(None, found), ())]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return WEIGHT_BYTES.get(settings.dtype, usual) * sum(numbers) or None


def count_weights(path: Path) -> int:
    """The number of weights in a file of safetensors.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_TABLE_BYTES:
            raise ValueError(f"{path}: no safetensors")
        table = json.loads(file.read(length))
    return sum(prod(entry["shape"]) for name, entry in table.items() if name != "__metadata__")


def find_onnx_files(file: str | None, find: Callable[[str], Path | None]) -> Sequence[Path]:
    """The ONNX file of a model, and behind it those of its weights; empty if there is none.

    Args:
        file: The setting `onnx_file`.
        find: Finds a file by its name, relative to the model.
    """
    for name in ONNX_FILES if file is None else (file,):
        if (path := find(name)) is not None:
            others = (find(f"{name}{end}") for end in ONNX_WEIGHTS)
            return [path, *(each for each in others if each is not None)]
    return ()


def sum_file_bytes(paths: Sequence[Path]) -> int:
    """The size of files together. Raises OSError: one has gone."""
    return sum(path.stat().st_size for path in paths)


def _find_file(folder: Path, name: str) -> Path | None:
    path = folder / name
    return path if path.is_file() else None


def _find_folder(settings: ModelSettings) -> Path | None:
    """The folder with the model's files; None where the hub's have not been fetched."""
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        # It takes a tenth of a second, and most models are folders.
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(settings.model, "config.json", revision=settings.revision)
        if not isinstance(config, str):
            return None
        folder = Path(config).parent
    return folder
