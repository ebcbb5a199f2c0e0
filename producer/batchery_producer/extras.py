"""Libraries that only some files need: they come with the extra `datasets`."""

from importlib import import_module
from typing import Any

from batchery.errors import DatasetError

#: What each of them is for, in messages.
USES = {"pyarrow": "Parquet and Arrow files", "zstandard": "zstd files"}


def extra(name: str) -> Any:
    """Imports a library, or a module of it.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        raise DatasetError(
            f"{USES[library]} need {library}: pip install 'batchery[datasets]' ({error})"
        ) from None
