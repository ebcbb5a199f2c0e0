"""A model that a device serves: with its budget, and what there is to tell of it."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from batchery.execute import Limit, compute
from batchery.model import Model
from batchery_worker.budget import Budget
from batchery_worker.calibration_cache import CalibrationCache, cache_key
from batchery_worker.memory import Memory
from batchery_worker.planner import PASS_TOKENS, plan
from batchery_worker.trial import calibrated
from batchery_worker.wire import Work

logger = logging.getLogger("batchery.device")

#: Tokens of one forward pass where no setting says otherwise. On a CPU small micro-batches pad
#: less and cost no more per token (docs/benchmarks.md); a GPU wants its thousands of lanes filled.
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 512, "mps": 8_192, "cuda": 16_384}


class Served:
    """One model on one device."""

    def __init__(
        self, name: str, model: Model, device: str, memory: Memory, weights_bytes: int = 0
    ) -> None:
        """Begins with the default budget of the device.

        Args:
            name: Of its task.
            model: Loaded.
            device: As torch spells it.
            memory: Of that device.
            weights_bytes: What its load took of it.
        """
        self.name = name
        self.model = model
        self._device = device
        self._memory = memory
        self._weights_bytes = weights_bytes
        self._peak_bytes = 0
        kind = device.partition(":")[0]
        #: The budget without a setting, and what chose it.
        self._default = DEFAULT_MAX_BATCH_TOKENS[kind], "default"
        self._pass_tokens = PASS_TOKENS[kind]
        self._source = "default"
        self._measured: dict[str, Any] = {}
        self._budget = Budget(self._default[0])
        #: Forward passes that ran out of memory.
        self._failed_passes = 0

    def calibrate(self, cache: CalibrationCache) -> None:
        """Measures what forward passes cost, or reads what an earlier start measured.

        Whatever goes wrong is logged, and leaves the default budget.
        """
        try:
            self._calibrate(cache)
        except Exception:
            logger.warning("%s on %s cannot be calibrated", self.name, self._device, exc_info=True)

    def _calibrate(self, cache: CalibrationCache) -> None:
        about = {"device": self._memory.description(), "weights_bytes": self._weights_bytes}
        key = cache_key(self.name, self.model, about)
        kept = cache.get(key)
        found = kept or calibrated(self.model, self._memory)
        if found is None:
            return
        if kept is None:
            cache.put(key, found)
        tokens = found.max_batch_tokens(self._memory.free_bytes())
        self._pass_tokens = max(1, round(found.pass_tokens))
        self._default = tokens, "calibration"
        self._budget.ceiling, self._source = self._default
        self._measured = {
            "token_us": round(found.token_ms * 1e3, 3),
            "item_us": round(found.item_ms * 1e3, 3),
            "pass_ms": round(found.pass_ms, 3),
        }
        logger.info(
            "%s on %s: max_batch_tokens is %d, %s: %.1f us per token and %.2f ms per pass",
            *(self.name, self._device, tokens, "kept" if kept else "measured"),
            *(found.token_ms * 1e3, found.pass_ms),
        )

    def compute(self, items: Sequence[Any], work: Work, limit: Limit) -> tuple[list[Any], int, int]:
        """Runs the forward passes of a prepared batch; as `batchery.execute.compute`."""
        setting = work.max_batch_tokens
        self._budget.ceiling, self._source = (setting, "setting") if setting else self._default
        allowed, failed_passes = self._budget.allows(), self._failed_passes
        self._memory.forget_peak()
        done = compute(
            self.model,
            items,
            work.keywords,
            partial(self._plan, max_batch_size=work.max_batch_size),
            limit=limit,
            memory=self,
        )
        self._peak_bytes = max(self._peak_bytes, self._memory.peak_bytes())
        if self._failed_passes > failed_passes:
            self._memory.release()
            if self._budget.allows() < allowed:
                self._warn(allowed)
        return done

    def passed(self, tokens: int) -> None:
        """A forward pass fitted into memory."""
        self._budget.passed(tokens)

    def failed(self, tokens: int) -> None:
        """A forward pass did not."""
        self._failed_passes += 1
        self._budget.failed(tokens)

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` shows of it."""
        allowed = self._budget.allows()
        figures = {
            "max_batch_tokens": allowed,
            "chosen_by": "memory" if allowed < self._budget.ceiling else self._source,
            "out_of_memory": self._failed_passes,
            **self._measured,
        }
        if self._peak_bytes:
            figures |= {"weights_bytes": self._weights_bytes, "peak_bytes": self._peak_bytes}
        return figures

    def _plan(self, lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
        return plan(
            lengths,
            self._budget.allows(),
            max_batch_size,
            pads=self.model.pads,
            pass_tokens=self._pass_tokens,
        )

    def _warn(self, allowed: int) -> None:
        logger.warning(
            "%s on %s: no memory for forward passes of %d tokens; at most %d from now on, until"
            " more fits again (setting max_batch_tokens)",
            *(self.name, self._device, allowed, self._budget.allows()),
        )
