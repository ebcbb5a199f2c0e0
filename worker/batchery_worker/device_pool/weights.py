"""How much memory a model will need, from the tables of contents of its files."""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path

from batchery.settings import ModelSettings

#: Bytes of a weight in memory, by the setting `dtype`.
WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

#: Longest table of contents of a file that is read; one of a model with 100,000 weights has less.
MAX_TABLE_BYTES = 100_000_000


def estimate_bytes(settings: ModelSettings | None, device: str) -> int | None:
    """Estimates the memory of a model's weights before any of it is loaded.

    Quantized weights count in full: while they are loaded, they take as much.

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
        numbers = [count_weights(path) for path in _find_files(settings)]
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


def _find_files(settings: ModelSettings) -> Iterable[Path]:
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        # It takes a tenth of a second, and most models are folders.
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(settings.model, "config.json", revision=settings.revision)
        if not isinstance(config, str):
            return ()
        folder = Path(config).parent
    return sorted(folder.glob("*.safetensors"))
