"""Optional libraries, which only some files need."""

from importlib import import_module
from typing import Any

from batchery.errors import DatasetError

#: Library -> what needs it, for messages, and the extra that installs it.
USES = {
    "fsspec": ("URLs, bz2 and xz", "datasets"),
    "jinja2": ("reports", "report"),
    "matplotlib": ("reports", "report"),
    "pyarrow": ("Parquet and Arrow files", "datasets"),
    "zstandard": ("zstd files", "datasets"),
}


def extra(name: str) -> Any:
    """Imports a library, or a module of it.

    Raises:
        DatasetError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        library = name.partition(".")[0]
        things, name = USES[library]
        raise DatasetError(
            f"{things} need {library}: pip install 'batchery[{name}]' ({error})"
        ) from None
