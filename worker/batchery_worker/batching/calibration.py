"""Forward passes of growing size, measured before a device says that it is ready."""

import contextlib
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from batchery.execution.batch import prepare
from batchery.execution.bisect_failures import SETTLED, is_out_of_memory
from batchery.model import Model
from batchery_worker.batching.cost_model import Calibration, Point, calibrate
from batchery_worker.memory import Memory

logger = logging.getLogger("batchery.device")

#: Longest that all passes together may take, in seconds: a start shall not wait for more.
TRIAL_S = 2.0

#: Passes per shape, of which the fastest counts: what else the machine does only makes them slower.
REPEATS = 3

#: Largest pass, in tokens and in items; beyond that no device is faster.
MAX_TOKENS = 1 << 17

MAX_ITEMS = 1 << 10


def calibrated(
    model: Model, memory: Memory, clock: Callable[[], float] = time.perf_counter
) -> Calibration | None:
    """Measures a model that is loaded; on the thread that runs its forward passes.

    Args:
        model: Loaded and warmed up.
        memory: Of its device.
        clock: Seconds, on any scale.

    Returns:
        None where nothing follows from it: the model counts no tokens, is too slow to be measured
        in `TRIAL_S`, or the machine was busy. Whatever goes wrong is logged, and ends nothing.
    """
    try:
        found = calibrate(list(_points(model, memory, clock)))
    except Exception:
        logger.warning("%s cannot be calibrated", type(model).__name__, exc_info=True)
        found = None
    memory.release()
    return found


def shapes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Which passes are measured: the place of a length and how many items of it, by tokens."""
    grid = []
    for place, length in enumerate(lengths):
        count = 1
        while count * length <= MAX_TOKENS and count <= MAX_ITEMS:
            grid.append((count * length, place, count))
            # Four times as many is far enough to tell one from the other.
            count *= 4
    return [(place, count) for _, place, count in sorted(grid)]


def _points(model: Model, memory: Memory, clock: Callable[[], float]) -> Iterator[Point]:
    items = _items(model)
    if len(items) < 2:
        # One length cannot tell what an item costs from what its tokens cost.
        return
    end_s = clock() + TRIAL_S
    lengths = sorted(items)
    slowest_ms = 0.0
    last_tokens = 1
    for place, count in shapes(lengths):
        tokens = lengths[place] * count
        # Not begun if it would last beyond the end, as far as the last one tells.
        expected_s = REPEATS * slowest_ms / 1e3 * max(1.0, tokens / last_tokens)
        if clock() + expected_s > end_s:
            return
        batch = [items[lengths[place]]] * count
        try:
            point = _measure(model, memory, clock, batch, tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        slowest_ms, last_tokens = max(slowest_ms, point.ms), tokens
        yield point


def _measure(
    model: Model, memory: Memory, clock: Callable[[], float], batch: Sequence[Any], tokens: int
) -> Point:
    held_bytes = memory.allocated_bytes()
    memory.forget_peak()
    times_ms = []
    for _ in range(REPEATS):
        memory.wait()
        started_s = clock()
        model.postprocess(model.forward(batch))
        memory.wait()
        times_ms.append((clock() - started_s) * 1e3)
    peak_bytes = max(0, memory.peak_bytes() - held_bytes)
    return Point(tokens, len(batch), max(min(times_ms), 1e-3), peak_bytes)


def _items(model: Model) -> dict[int, Any]:
    """The model's own warm-up items, prepared, one of each length in tokens."""
    prepared = prepare(model, list(model.warm_up()), {})
    return {model.tokens(each): each for each in prepared if not isinstance(each, SETTLED)}


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
