"""A model that a device serves, with its token budget, its costs and its figures."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from batchery.execution.batch import Limit, compute, first_passes
from batchery.execution.bisect_failures import NON_VALUES
from batchery.execution.lookahead import Lookahead
from batchery.model import Model
from batchery.outcomes import Failed
from batchery_worker.batching.cost_model import CostModel, Costs
from batchery_worker.batching.planner import PASS_TOKENS, plan
from batchery_worker.batching.token_budget import TokenBudget
from batchery_worker.ipc.messages import Work
from batchery_worker.memory import Memory

logger = logging.getLogger("batchery.device")

#: Tokens of one forward pass without a setting. On a CPU, longer passes cost no less per token
#: (docs/benchmarks.md), and jobs wait for them. A GPU needs thousands of tokens to be busy.
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 1024, "mps": 8_192, "cuda": 16_384}


class ServedModel:
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
        """Starts with the default budget of the device.

        Args:
            name: Name of its task.
            model: Loaded.
            device: As torch spells it.
            memory: Memory of that device.
            weights_bytes: Memory that the weights take.
            clock: Seconds, on any scale.
        """
        self.name = name
        self.model = model
        #: What its results depend on; empty if results are not cached.
        self.identity = ""
        self._device = device
        self._memory = memory
        self._weights_bytes = weights_bytes
        self._peak_bytes = 0
        kind = device.partition(":")[0]
        self._default_tokens = DEFAULT_MAX_BATCH_TOKENS[kind]
        self._pass_tokens = PASS_TOKENS[kind]
        self._source = "default"
        self._clock = clock
        self._cost_model = CostModel(Costs(1.0, 0.0, self._pass_tokens))
        self._budget = TokenBudget(self._default_tokens)
        self._lookahead = Lookahead(model)
        #: Forward passes that ran out of memory.
        self._failed_passes = 0
        #: Passes of the current batch that were planned and that ran, and tokens of the latter.
        self._planned_passes = self._passes = self._passed_tokens = 0

    def start(self, items: Sequence[Any], work: Work) -> None:
        """Starts the first passes of the batch that comes next, as many as the model allows.

        Raises:
            SoftTimeLimitExceeded: As `Lookahead.start`.
        """
        if self._lookahead.has_room:
            cuts = partial(self._cuts, max_batch_size=work.max_batch_size)
            for first in first_passes(self.model, items, cuts):
                self._lookahead.start(first, work.keywords)

    def compute(
        self,
        items: Sequence[Any],
        work: Work,
        limit: Limit,
        start_next_batch: Callable[[], None] = lambda: None,
    ) -> tuple[list[Any], int, int]:
        """Runs the forward passes of a prepared batch; see `batchery.execution.batch.compute`."""
        setting = work.max_batch_tokens
        self._budget.ceiling = setting or self._default_tokens
        self._source = "setting" if setting else "default"
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
            lookahead=self._lookahead,
            start_next_batch=start_next_batch,
        )
        if any(_has_failed(*each) for each in zip(items, done[0], strict=True)):
            # Some errors of CUDA end its context, and with it all passes from now on. Those raise
            # here, outside of what isolates failures: the process ends, and its jobs run again.
            self._memory.wait()
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
        """A forward pass did not fit into memory."""
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
        costs = self._cost_model.costs
        if costs is None:
            return {}
        return {
            "token_us": round(costs.token_ms * 1e3, 3),
            "item_us": round(costs.item_ms * 1e3, 3),
            "pass_ms": round(costs.pass_ms, 3),
            "useful_items": self._cost_model.useful_items,
            "fitted_batches": self._cost_model.batches,
        }

    def _learn(self, items: Sequence[Any], computed_tokens: int, took_ms: float) -> None:
        """Learns from a batch, if all of it ran as planned."""
        if (self._passes, self._passed_tokens) != (self._planned_passes, computed_tokens):
            # A pass failed and ran again in parts.
            return
        fit = sum(not isinstance(each, NON_VALUES) for each in items)
        self._cost_model.ran(computed_tokens, fit, self._passes, took_ms)

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
            streams=getattr(self.model, "cpu_streams", 1),
        )

    def _warn(self, allowed: int) -> None:
        logger.warning(
            "%s on %s: no memory for forward passes of %d tokens; at most %d from now on, until"
            " more fits again (setting max_batch_tokens)",
            *(self.name, self._device, allowed, self._budget.allows()),
        )


def _has_failed(prepared: Any, outcome: Any) -> bool:
    """Whether an item has failed since it was prepared."""
    return isinstance(outcome, Failed) and outcome is not prepared
