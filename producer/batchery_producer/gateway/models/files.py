"""The small files of a model that the gateway itself reads; never weights."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchery_producer.gateway.models.served_models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem

logger = logging.getLogger("uvicorn.error")

T = TypeVar("T")


class ModelFiles:
    """Files of a model: of its folder, or of its repository on the Hugging Face hub."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        folder = Path(model.settings.model).expanduser()
        self._folder = folder if folder.is_dir() else None

    def path(self, name: str) -> Path | None:
        """Finds a file, and downloads it if necessary; None if there is none.

        Raises:
            Problem: The gateway's machine has no such folder, and the hub does not answer.
        """
        if self._folder is not None:
            path = self._folder / name
            return path if path.is_file() else None
        # It takes longer to import than all else, and folders need none of it.
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        settings = self._model.settings
        try:
            return Path(hf_hub_download(settings.model, name, revision=settings.revision))
        except LocalEntryNotFoundError as error:
            raise self._unreadable(name, error) from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def json(self, name: str) -> Any:
        """Reads a JSON file; an empty dictionary where there is none.

        Raises:
            Problem: It cannot be read, or is no JSON.
        """
        path = self.path(name)
        if path is None:
            return {}
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> Problem:
        model = self._model
        logger.warning("model %r: %s of %r: %s", model.name, name, model.settings.model, error)
        return Problem(
            Kind.UNSUPPORTED,
            f"model {model.name!r}: the gateway cannot read {name}, which it needs here; its log"
            " says why",
        )


class PerModel(Generic[T]):
    """Makes something for each model once, in a thread, when it is first needed."""

    def __init__(self, make: Callable[[ServedModel], T]) -> None:
        self._make = make
        self._made: dict[str, asyncio.Task[T]] = {}

    async def of(self, model: ServedModel) -> T:
        """What belongs to a model.

        Raises:
            Problem: Whatever making it raises, such as this; the next call tries again.
        """
        made = self._made.get(model.name)
        if made is None:
            made = asyncio.create_task(asyncio.to_thread(self._make, model))
            self._made[model.name] = made
        try:
            # Others wait for it, too.
            return await asyncio.shield(made)
        except Exception:
            self._made.pop(model.name, None)
            raise
