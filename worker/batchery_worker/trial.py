"""Forward passes of growing size, measured before a device says that it is ready."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from batchery.execute import prepare
from batchery.isolate import SETTLED, is_out_of_memory
from batchery.model import Model
from batchery_worker.calibration import Calibration, Point, calibrate
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
