"""Calibrations on disk, so that only the first start measures; nothing here ever fails a start."""

import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.model import Model
from batchery_worker.calibration import Calibration

logger = logging.getLogger("batchery.device")


class CalibrationCache:
    """One small file per model, number format, device and version."""

    def __init__(self, folder: str | None) -> None:
        """Touches nothing yet.

        Args:
            folder: Made when something is kept; None to keep nothing.
        """
        self._folder = Path(folder) if folder else None

    def get(self, key: str) -> Calibration | None:
        """What was kept under a key; None if nothing, or nothing that can be read."""
        if self._folder is None:
            return None
        try:
            stored = json.loads((self._folder / key).read_text())
            found = Calibration(**{field.name: stored[field.name] for field in fields(Calibration)})
            # Shows whether these are numbers of which a budget can be made.
            found.max_batch_tokens(None)
            return found
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 - whatever somebody wrote there
            logger.info("calibration %s cannot be read: %r", self._folder / key, error)
            return None

    def put(self, key: str, calibration: Calibration) -> None:
        """Keeps a calibration, if the folder can be written."""
        if self._folder is None:
            return
        path = self._folder / key
        # Devices may start at the same time: each writes a file of its own, the last one wins.
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(calibration)))
            draft.replace(path)
        except OSError as error:
            logger.info("calibration %s cannot be kept: %s", path, error)
            with contextlib.suppress(OSError):
                draft.unlink()


def cache_key(name: str, model: Model, device: Mapping[str, Any]) -> str:
    """A file name that is another one as soon as the costs of a pass may be others.

    Args:
        name: Of the model's task.
        model: Loaded.
        device: What there is to say of the device: its kind, its memory, the size of the weights.
    """
    libraries = [sys.modules.get(each) for each in ("torch", "torchao")]
    known = {
        "name": name,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        # Of built-in models: which one, its number format, its bits, its forward pass.
        "settings": repr(getattr(model, "settings", None)),
        "pads": model.pads,
        "device": {**device},
        "versions": [
            version("batchery"),
            *(getattr(each, "__version__", None) for each in libraries),
        ],
    }
    spelled = json.dumps(known, sort_keys=True, default=repr)
    return f"calibration-{hashlib.sha256(spelled.encode()).hexdigest()[:32]}.json"
