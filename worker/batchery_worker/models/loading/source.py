"""Where a model comes from: a local folder, or a repository of the Hugging Face hub."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers.utils import logging as transformers_logging

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings

#: Model ids of the hub. Any other name must be a folder.
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

#: Maximum length of an error of transformers that is quoted, in characters. The middle is left out:
#: the start says what happened, and the end what to do.
MAX_REASON_CHARS = 400


class ModelSource:
    """The files of one model.

    Attributes:
        name: What transformers loads: the folder, or the id on the hub.
        folder: The folder; None for a model of the hub.
        options: Keyword arguments that every `from_pretrained` needs.

    Raises:
        ModelLoadError: The setting is a path, and there is no folder with a model.
    """

    def __init__(self, settings: ModelSettings) -> None:
        folder = Path(settings.model).expanduser()
        self.folder = folder if folder.exists() else None
        if self.folder is None and not HUB_ID.fullmatch(settings.model):
            raise ModelLoadError(f"model {settings.model!r}: there is no such folder")
        if self.folder is not None:
            _check_folder(settings.model, self.folder)
        self.name = settings.model if self.folder is None else str(folder)
        self.options: dict[str, Any] = {
            "revision": settings.revision,
            "trust_remote_code": settings.trust_remote_code,
        }

    def path(self, name: str) -> Path | None:
        """Finds a file, and downloads it if necessary.

        Args:
            name: Relative to the model, such as `1_Pooling/config.json`.

        Returns:
            None where the model has no such file, or where the hub cannot be asked and the file is
            not in its cache.
        """
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        try:
            return Path(hf_hub_download(self.name, name, revision=self.options["revision"]))
        except EntryNotFoundError:
            return None

    def json(self, name: str) -> Any:
        """Reads a JSON file; None where `path` finds none.

        Raises:
            ModelLoadError: The file is not JSON.
        """
        path = self.path(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelLoadError(f"model {self.name!r}: {name} is not JSON: {error}") from None


def _check_folder(name: str, folder: Path) -> None:
    """Finds common mistakes that transformers explains in many lines or not at all."""
    if not folder.is_dir():
        raise ModelLoadError(f"model {name!r}: is a file; name the folder that it is in")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"model {name!r}: the folder has no config.json; name one that save_pretrained wrote"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelLoadError(
            f"model {name!r}: the folder has no weights in safetensors, the only format that is"
            " loaded; load the model with transformers once and save it with save_pretrained"
        )
    for path in weights:
        try:
            # It reads the table of contents, and compares it with the file's size.
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ModelLoadError(
                f"model {name!r}: {path.name} is damaged, or not all of it is there: {error};"
                " copy or download it again"
            ) from None


def reason(error: Exception) -> str:
    """The text of an error on one line; transformers writes many."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = MAX_REASON_CHARS // 2
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps progress bars and advice out of the worker's log; errors say what matters."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
