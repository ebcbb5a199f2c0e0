"""Where a model comes from, a folder or a repository of the hub, and what its results depend on."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants as hub_constants
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from batchery.errors import ModelLoadError, StartError
from batchery.model_settings import HUB_ID, PLACE_OPTIONS, TASK_OPTIONS, ModelSettings
from batchery_worker.result_cache import DIGEST_BYTES

#: Maximum length of an error of transformers that is quoted, in characters. The middle is left out:
#: the start says what happened, and the end what to do.
MAX_REASON_CHARS = 400


#: Settings that never change a result: where the model is, and how its jobs are batched and cached.
NEUTRAL = {"model", "revision", "queue", "cache", *TASK_OPTIONS, *PLACE_OPTIONS}

#: Suffixes of weights that are never loaded, and may have many gigabytes.
NEVER_LOADED = {".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth", ".tflite"}

#: Length of the name of a version, in bytes; it has two letters for each.
VERSION_BYTES = 6

#: Files of which a model has at least one.
CONFIGS = ("config.json", "modules.json", "adapter_config.json")

#: Packages whose versions may change a result.
PACKAGES = ("batchery", "torch", "transformers", "tokenizers", "sentence-transformers")


class ModelSource:
    """The files of one model.

    Attributes:
        name: What transformers loads: the folder, or the id on the hub.
        folder: The folder; None for a model of the hub.
        options: Keyword arguments that every `from_pretrained` needs.
        others: Files in the folder that count, though those of their format are never loaded
            otherwise.

    Raises:
        ValueError: The setting is a path, and there is no folder with a model.
    """

    others: Sequence[Path] = ()

    def __init__(self, settings: ModelSettings) -> None:
        self._settings = settings
        folder = Path(settings.model).expanduser()
        self.folder = folder if folder.exists() else None
        if self.folder is None and not HUB_ID.fullmatch(settings.model):
            raise ValueError("there is no such folder")
        if self.folder is not None:
            _check_folder(self.folder, needs_weights=settings.engine != "onnx")
        self.name = settings.model if self.folder is None else str(folder)
        self.options: dict[str, Any] = {
            "revision": settings.revision,
            "trust_remote_code": settings.trust_remote_code,
        }
        if self.path("adapter_config.json") is not None:
            raise ValueError(
                "adapter_config.json is of an adapter, which is not applied; merge it into the"
                " weights (peft: merge_and_unload), or take it away"
            )

    @property
    def is_here(self) -> bool:
        """Whether the hub need not be asked, or must not."""
        return self.folder is not None or bool(hub_constants.HF_HUB_OFFLINE)

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

    def load(self, auto_class: Any, **options: Any) -> tuple[Any, list[str]]:
        """Loads a model of transformers; returns it, and the weights that its files lack."""
        model, info = auto_class.from_pretrained(
            self.name,
            use_safetensors=True,
            output_loading_info=True,
            **self.options,
            **options,
        )
        return model, sorted(info["missing_keys"])

    def json(self, name: str) -> Any:
        """Reads a JSON file; None where `path` finds none.

        Raises:
            ValueError: The file is not JSON.
        """
        path = self.path(name)
        if path is None:
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None

    def identity(self, model: Any, run: Mapping[str, str]) -> str:
        """A text that changes whenever results may change.

        Args:
            model: The model of transformers.
            run: How it is run, besides its number format.

        Raises:
            OSError: The model's files cannot be read.
        """
        if self.folder is not None:
            files = self._digest(self.folder)
        else:
            files = f"{self.name}@{getattr(model.config, '_commit_hash', None) or self._commit()}"
        known = {
            "files": files,
            "settings": self._settings.model_dump(mode="json", exclude=NEUTRAL),
            "run": {"dtype": str(model.dtype), **run},
            "versions": {name: version(name) for name in PACKAGES},
        }
        return json.dumps(known, sort_keys=True)

    def version(self) -> str:
        """A short name that changes with a model's files, by their sizes and times, or its options.

        It reads no file. A model of the hub is known by its commit.
        """
        files: Any
        try:
            if self.folder is None:
                files = self._commit()
            else:
                stats = [(each.name, each.stat()) for each in self._list_files(self.folder)]
                files = [(name, each.st_size, each.st_mtime_ns) for name, each in stats]
        except OSError:
            return ""
        options = self._settings.model_dump(mode="json", exclude=NEUTRAL)
        known = json.dumps([self.name, self._settings.revision, files, options], sort_keys=True)
        return hashlib.blake2b(known.encode(), digest_size=VERSION_BYTES).hexdigest()

    def _commit(self) -> str:
        """The name of the folder of the hub's cache with the files of one commit."""
        for config in map(self.path, CONFIGS):
            if config is not None:
                return config.parent.name
        raise FileNotFoundError(f"model {self.name!r}: its files are not found any more")

    def _list_files(self, folder: Path) -> list[Path]:
        """The files that count, in order: no hidden ones, and no weights that are never loaded."""
        found = [
            path
            for path in sorted(folder.rglob("*"))
            if path.suffix not in NEVER_LOADED
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
            and path.is_file()
        ]
        return [*found, *self.others]

    def _digest(self, folder: Path) -> str:
        """A digest of the files, which changes with every byte; it reads a gigabyte per second."""
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for path in self._list_files(folder):
            name = path.relative_to(folder)
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "blake2b").hexdigest()
            whole.update(f"{name.as_posix()}\0{content}\n".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()


def _check_folder(folder: Path, *, needs_weights: bool) -> None:
    """Finds common mistakes that transformers explains in many lines or not at all."""
    if not folder.is_dir():
        raise ValueError("is a file; name the folder that it is in")
    # Some have the transformer's in a folder of their own, and adapters none.
    if not any((folder / name).is_file() for name in CONFIGS):
        raise ValueError("the folder has no config.json; name one that save_pretrained wrote")

    if needs_weights and not any(folder.rglob("*.safetensors")):
        raise ValueError(
            "the folder has no weights in safetensors, the only format that is loaded; load the"
            " model with transformers once and save it with save_pretrained"
        )


def check_weights(missing: Sequence[str], name: str, task: str) -> None:
    """Refuses a model of which something has random weights.

    Args:
        missing: Names of its weights that its files lack.
        name: What would have them.
        task: What a model has learned that has them.

    Raises:
        ValueError: Weights are missing; names two of them.
    """
    # A pooler follows the token vectors, and is often missing; no encoder needs it.
    lost = [key for key in missing if name != "encoder" or "pooler" not in key.split(".")]
    if lost:
        raise ValueError(
            f"its checkpoint has no trained {name}, as it lacks {len(lost)} of its weights"
            f" ({', '.join(lost[:2])}); name a model that was fine-tuned for {task}"
        )


@contextmanager
def _replaced(owner: Any, name: str, call: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function for this thread; another may load a model at the same time.

    Args:
        owner: Its module, or its class if it is a class method.
        name: Of the function.
        call: Gets the function with its arguments, a `partial`.
    """
    plain, own = vars(owner)[name], threading.get_ident()
    function = getattr(plain, "__func__", plain)

    def replacement(*args: Any, **keywords: Any) -> Any:
        usual = partial(function, *args, **keywords)
        return call(usual) if threading.get_ident() == own else usual()

    setattr(owner, name, replacement if function is plain else classmethod(replacement))
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def watch_loading(*, weightless: bool) -> Iterator[list[str]]:
    """Says which weights the files lack of the models that are loaded in this block.

    A library between us and transformers says nothing of that, and would read pickles.

    Args:
        weightless: The models get no weights, only room for them, which takes no memory.
    """
    from transformers import PreTrainedModel

    missing: list[str] = []

    def load(usual: Any) -> Any:
        if weightless:
            with torch.device("meta"):
                empty = usual.args[0](usual.keywords["config"])
            return empty.to_empty(device="cpu")
        model, info = usual(output_loading_info=True)
        missing.extend(sorted(info["missing_keys"]))
        return model

    def refuse(_: Any) -> Any:
        raise ValueError("a module has no weights in safetensors, the only format that is loaded")

    with _replaced(PreTrainedModel, "from_pretrained", load), _replaced(torch, "load", refuse):
        yield missing


def reason(error: Exception) -> str:
    """The text of an error on one line; transformers writes many."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = MAX_REASON_CHARS // 2
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Around all that loads a model: an error names it, in one line, and libraries are quiet.

    Raises:
        ValueError: In the place of any other error but a `StartError`.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except StartError:
        raise
    except Exception as error:
        raise ModelLoadError(f"model {name!r}: {reason(error)}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(source: ModelSource) -> Any:
    """Loads the tokenizer.

    Raises:
        ValueError: The model has no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"has no tokenizer, so it cannot take texts: {reason(error)}") from error
    check_tokenizer(source, tokenizer)
    return tokenizer


def check_tokenizer(source: ModelSource, tokenizer: Any, folder: str = "") -> None:
    """Makes sure that a tokenizer has files; without, transformers would make an empty one.

    Args:
        source: The model.
        tokenizer: Of transformers.
        folder: Where its files are, relative to the model.

    Raises:
        ValueError: There are none.
    """
    files = sorted({"tokenizer.json", *getattr(tokenizer, "vocab_files_names", {}).values()})
    if not any(source.path(f"{folder}/{file}".lstrip("/")) for file in files):
        raise ValueError(
            f"has no tokenizer, so it cannot take texts: none of {', '.join(files)} is there"
        )
