"""A model that a device serves: with its budget, and what there is to tell of it."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from batchery.execution.batch import Limit, compute, first_passes
from batchery.execution.bisect_failures import SETTLED
from batchery.execution.lookahead import Early
from batchery.model import Model
from batchery_worker.batching.calibration import CalibrationCache, cache_key, calibrated
from batchery_worker.batching.cost_model import Calibration, Costs, RecentBatches
from batchery_worker.batching.planner import PASS_TOKENS, plan
from batchery_worker.batching.token_budget import Budget
from batchery_worker.ipc.messages import Work
from batchery_worker.memory import Memory

logger = logging.getLogger("batchery.device")

#: Tokens of one forward pass where no setting says otherwise. On a CPU longer ones cost no less per
#: token (docs/benchmarks.md), and others wait for them; a GPU wants its thousands of lanes filled.
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 1024, "mps": 8_192, "cuda": 16_384}


#: Share by which a budget that was measured must be off until recent batches change it: what they
#: say is never quite the same, and each budget makes forward passes of another size.
STEADY = 0.25


class Served:
    """One model on one device."""

    def __init__(
        self,
        name: str,
        model: Model,
        device: str,
        memory: Memory,
        weights_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begins with the default budget of the device.

        Args:
            name: Of its task.
            model: Loaded.
            device: As torch spells it.
            memory: Of that device.
            weights_bytes: What its load took of it.
            clock: Seconds, on any scale.
        """
        self.name = name
        self.model = model
        #: What its results depend on; empty where none of them is kept.
        self.identity = ""
        self._device = device
        self._memory = memory
        self._weights_bytes = weights_bytes
        self._peak_bytes = 0
        kind = device.partition(":")[0]
        #: The budget without a setting, and what chose it.
        self._default = DEFAULT_MAX_BATCH_TOKENS[kind], "default"
        self._pass_tokens = PASS_TOKENS[kind]
        self._source = "default"
        self._clock = clock
        #: What was measured at the start, and the memory that was free then.
        self._calibration: Calibration | None = None
        self._free_bytes: int | None = None
        self._recent = RecentBatches(Costs(1.0, 0.0, self._pass_tokens))
        self._budget = Budget(self._default[0])
        self._early = Early(model)
        #: Forward passes that ran out of memory.
        self._failed_passes = 0
        #: Of the batch that runs: passes as they were planned, and what of them ran.
        self._planned_passes = self._passes = self._passed_tokens = 0

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
        self._calibration, self._free_bytes = found, self._memory.free_bytes()
        self._recent = RecentBatches(found.costs)
        tokens = self._follow(found)
        self._budget.ceiling, self._source = self._default
        logger.info(
            "%s on %s: max_batch_tokens is %d, %s: %.1f us per token and %.2f ms per pass",
            *(self.name, self._device, tokens, "kept" if kept else "measured"),
            *(found.token_ms * 1e3, found.pass_ms),
        )

    def _follow(self, found: Calibration) -> int:
        """Takes the budget from a calibration, for the next batch, and returns it."""
        tokens = found.max_batch_tokens(self._free_bytes)
        self._pass_tokens = max(1, round(found.pass_tokens))
        self._default = tokens, "calibration"
        return tokens

    def begin(self, items: Sequence[Any], work: Work) -> None:
        """Begins the first passes of the batch that comes next, as many as the model allows.

        Raises:
            SoftTimeLimitExceeded: As `Early.begin`.
        """
        if self._early.has_room:
            cuts = partial(self._cuts, max_batch_size=work.max_batch_size)
            for first in first_passes(self.model, items, cuts):
                self._early.begin(first, work.keywords)

    def compute(
        self,
        items: Sequence[Any],
        work: Work,
        limit: Limit,
        following: Callable[[], None] = lambda: None,
    ) -> tuple[list[Any], int, int]:
        """Runs the forward passes of a prepared batch; as `batchery.execution.batch.compute`."""
        setting = work.max_batch_tokens
        self._budget.ceiling, self._source = (setting, "setting") if setting else self._default
        allowed, failed_passes = self._budget.allows(), self._failed_passes
        self._planned_passes = self._passes = self._passed_tokens = 0
        self._memory.forget_peak()
        started_s = self._clock()
        done = compute(
            self.model,
            items,
            work.keywords,
            partial(self._plan, max_batch_size=work.max_batch_size),
            limit=limit,
            memory=self,
            early=self._early,
            following=following,
        )
        took_ms = (self._clock() - started_s) * 1e3
        self._peak_bytes = max(self._peak_bytes, self._memory.peak_bytes())
        if self._failed_passes == failed_passes:
            self._learn(items, done[2], took_ms)
        else:
            self._memory.release()
            if self._budget.allows() < allowed:
                self._warn(allowed)
        return done

    def passed(self, tokens: int) -> None:
        """A forward pass fitted into memory."""
        self._passes += 1
        self._passed_tokens += tokens
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
            **self._costs(),
        }
        if self._peak_bytes:
            figures |= {"weights_bytes": self._weights_bytes, "peak_bytes": self._peak_bytes}
        return figures

    def _costs(self) -> dict[str, Any]:
        measured = self._calibration and self._calibration.costs
        costs = self._recent.costs or measured
        if costs is None:
            return {}
        recent: dict[str, Any] = {}
        if self._recent.costs is not None:
            recent = {
                "useful_items": self._recent.useful_items,
                "fitted_batches": self._recent.batches,
            }
        return {
            "token_us": round(costs.token_ms * 1e3, 3),
            "item_us": round(costs.item_ms * 1e3, 3),
            "pass_ms": round(costs.pass_ms, 3),
            **recent,
        }

    def _learn(self, items: Sequence[Any], computed_tokens: int, took_ms: float) -> None:
        """Notes what a batch took, if all of it ran as it was planned."""
        if (self._passes, self._passed_tokens) != (self._planned_passes, computed_tokens):
            # A pass failed, and ran again in parts.
            return
        fit = sum(not isinstance(each, SETTLED) for each in items)
        new = self._recent.ran(computed_tokens, fit, self._passes, took_ms)
        costs = self._recent.costs
        # Where nothing was measured at the start, the budget is a setting's or the default: a
        # worker that shares its cores would never let it come to rest.
        if not new or costs is None or not costs.token_ms or self._calibration is None:
            return
        found = replace(self._calibration, **costs._asdict())
        tokens = self._default[0]
        if abs(found.max_batch_tokens(self._free_bytes) - tokens) > STEADY * tokens:
            logger.info(
                "%s on %s: max_batch_tokens is %d, by recent batches; it was %d",
                *(self.name, self._device, self._follow(found), tokens),
            )

    def _plan(self, lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
        cuts = self._cuts(lengths, max_batch_size)
        self._planned_passes += len(cuts)
        return cuts

    def _cuts(self, lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
        return plan(
            lengths,
            self._budget.allows(),
            max_batch_size,
            pads=self.model.pads,
            pass_tokens=self._pass_tokens,
            lanes=self.model.lanes,
        )

    def _warn(self, allowed: int) -> None:
        logger.warning(
            "%s on %s: no memory for forward passes of %d tokens; at most %d from now on, until"
            " more fits again (setting max_batch_tokens)",
            *(self.name, self._device, allowed, self._budget.allows()),
        )
