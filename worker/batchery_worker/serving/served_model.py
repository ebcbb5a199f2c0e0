"""A model that a device serves, with its token budget, its costs and its figures."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from batchery.device_names import device_type
from batchery.execution.batch import Limit, Lookahead, compute, first_passes
from batchery.execution.bisect_failures import NON_VALUES
from batchery.model import Model
from batchery.outcomes import Failed
from batchery_worker.batching.cost_model import CostModel, Costs
from batchery_worker.batching.planner import (
    MAX_PASS_TOKENS_FACTOR,
    MIN_STREAM_TOKENS,
    PASS_TOKENS,
    plan,
)
from batchery_worker.batching.token_budget import TokenBudget
from batchery_worker.memory import Memory
from batchery_worker.work import Work

logger = logging.getLogger("batchery.device")

#: Tokens of one forward pass without a setting. On a CPU, longer passes cost no less per token
#: (docs/benchmarks.md), and jobs wait for them. A GPU needs thousands of tokens to be busy.
DEFAULT_MAX_BATCH_TOKENS = {"cpu": 1024, "mps": 8_192, "cuda": 16_384}


@dataclass(slots=True)
class _BatchPasses:
    """The forward passes of one batch so far."""

    #: Passes that were planned and that ran, and tokens of the latter.
    planned: int = 0
    ran: int = 0
    tokens: int = 0
    #: How long other batches have run between them, in seconds.
    others_s: float = 0.0


#: After so much time for other batches, in seconds, a batch says nothing about its costs: passes
#: that had been started went on meanwhile. Without another batch it takes microseconds to look.
MAX_INTERRUPTED_S = 1e-3


#: What outlives an instance of a model that makes room for another one.
LEARNED = ("_budget", "_cost_model", "_failed_passes", "_pass_tokens", "_peak_bytes", "_tokens")


class LoadedModel:
    """One model on one device."""

    def __init__(
        self,
        name: str,
        model: Model,
        device: str,
        memory: Memory,
        loaded_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts with the default budget of the device.

        Args:
            name: Name of its task.
            model: Loaded.
            device: As torch spells it.
            memory: Memory of that device.
            loaded_bytes: Memory that it holds once loaded: weights, and what its first passes keep.
            clock: Seconds, on any scale.
        """
        self.name = name
        self.model = model
        #: What its results depend on; empty if results are not cached.
        self.identity = ""
        #: Its name for what it has loaded; empty if it has none.
        self.version = ""
        #: Whether a batch may use it now.
        self.is_loaded = True
        #: When it was loaded, and when a batch used it last, on the clock.
        self.loaded_s = 0.0
        self.used_s: float | None = None
        self._device = device
        self._memory = memory
        self.loaded_bytes = loaded_bytes
        self._peak_bytes = 0
        #: Tokens that it has computed, without padding.
        self._tokens = 0
        kind = device_type(device)
        # Some built-in kinds know better.
        usual = getattr(model, "usual_pass_tokens", {})
        self._default_tokens = usual.get(kind, DEFAULT_MAX_BATCH_TOKENS[kind])
        self._pass_tokens = self._default_pass_tokens = PASS_TOKENS[kind]
        self._streams = int(getattr(model, "pass_streams", 1))
        self._min_stream_tokens = MIN_STREAM_TOKENS[kind]
        self._source = "default"
        self._clock = clock
        self._cost_model = CostModel(Costs(1.0, 0.0, self._pass_tokens))
        self._budget = TokenBudget(self._default_tokens)
        self._lookahead = Lookahead(model)
        #: Forward passes that ran out of memory.
        self._failed_passes = 0
        self._batch = _BatchPasses()

    def inherit(self, earlier: "LoadedModel") -> None:
        """Takes over what an earlier instance of the same model has learned and counted."""
        for name in LEARNED:
            setattr(self, name, getattr(earlier, name))

    def unload(self) -> Model:
        """Ends the model, to which batches that wait may refer; returns it."""
        model, self.is_loaded = self.model, False
        # A thread may be about to prepare a batch with it, which is prepared anew when it runs.
        self.model = Model()
        self._lookahead = Lookahead(self.model)
        try:
            model.unload()
        except Exception:
            logger.exception("%s: unload has failed", self.name)
        return model

    def limit(self, max_batch_tokens: int | None) -> None:
        """Limits the tokens of a forward pass; None for the default of the device."""
        self._budget.ceiling = max_batch_tokens or self._default_tokens
        self._source = "setting" if max_batch_tokens else "default"

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a forward pass, as it stands now."""
        return self._budget.allows()

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
        between_passes: Callable[[], None] = lambda: None,
    ) -> tuple[list[Any], int, int]:
        """Runs the forward passes of a prepared batch; see `batchery.execution.batch.compute`.

        A call of `between_passes` may compute another batch of this model.
        """
        self.limit(work.max_batch_tokens)
        allowed, failed_passes = self._budget.allows(), self._failed_passes
        interrupted, self._batch = self._batch, _BatchPasses()
        self._report_urgent(work.urgent)
        self._memory.forget_peak()
        started_s = self.used_s = self._clock()
        done = compute(
            self.model,
            items,
            work.keywords,
            partial(self._plan, max_batch_size=work.max_batch_size),
            limit=limit,
            memory=self,
            # The passes that were started for other batches are theirs.
            lookahead=Lookahead(self.model) if work.urgent else self._lookahead,
            start_next_batch=start_next_batch,
            between_passes=partial(self._run_others, between_passes),
        )
        if any(_has_failed(*each) for each in zip(items, done[0], strict=True)):
            # Some errors of CUDA end its context, and with it all passes from now on. Those raise
            # here, outside of what isolates failures: the process ends, and its jobs run again.
            self._memory.wait()
        self._tokens += done[1]
        took_ms = (self._clock() - started_s - self._batch.others_s) * 1e3
        self._peak_bytes = max(self._peak_bytes, self._memory.peak_bytes())
        if self._failed_passes == failed_passes:
            self._learn(items, done[2], took_ms)
        else:
            self._memory.release()
            if self._budget.allows() < allowed:
                self._warn(allowed)
        self._batch = interrupted
        self._report_urgent(False)
        return done

    def _report_urgent(self, is_urgent: bool) -> None:
        """Tells a model that wants to know; between two passes of a batch, that is not urgent."""
        if getattr(self.model, "is_urgent", is_urgent) is not is_urgent:
            self.model.is_urgent = is_urgent  # type: ignore[attr-defined]

    def _run_others(self, between_passes: Callable[[], None]) -> None:
        started_s = self._clock()
        between_passes()
        self._batch.others_s += self._clock() - started_s

    def passed(self, tokens: int) -> None:
        """A forward pass fitted into memory."""
        self._batch.ran += 1
        self._batch.tokens += tokens
        self._budget.passed(tokens)

    def failed(self, tokens: int) -> None:
        """A forward pass did not fit into memory."""
        self._failed_passes += 1
        self._budget.failed(tokens)

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` shows of it."""
        allowed = self._budget.allows()
        figures = {
            **({"version": self.version} if self.version else {}),
            "max_batch_tokens": allowed,
            "chosen_by": "memory" if allowed < self._budget.ceiling else self._source,
            "out_of_memory": self._failed_passes,
            **self._costs(),
        }
        if flops := getattr(self.model, "flops_per_token", 0):
            figures["flops"] = float(flops) * self._tokens
        if self._peak_bytes:
            figures |= {"loaded_bytes": self.loaded_bytes, "peak_bytes": self._peak_bytes}
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
        if (self._batch.ran, self._batch.tokens) != (self._batch.planned, computed_tokens):
            # A pass failed and ran again in parts.
            return
        if self._batch.others_s > MAX_INTERRUPTED_S:
            return
        fit = sum(not isinstance(each, NON_VALUES) for each in items)
        if self._cost_model.ran(computed_tokens, fit, self._batch.ran, took_ms):
            self._choose_pass_tokens()

    def _choose_pass_tokens(self) -> None:
        """Lets plans count what a pass was found to cost.

        Not for passes side by side: their times overlap. The time of such a batch tells what a pass
        adds to it, which is next to nothing where a stream was free, and not what the pass costs.
        """
        if self._streams == 1 and self._cost_model.is_believable:
            least = self._default_pass_tokens / MAX_PASS_TOKENS_FACTOR
            largest = self._default_pass_tokens * MAX_PASS_TOKENS_FACTOR
            self._pass_tokens = round(min(max(self._cost_model.pass_tokens, least), largest))

    def _plan(self, lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
        cuts = self._cuts(lengths, max_batch_size)
        self._batch.planned += len(cuts)
        return cuts

    def _cuts(self, lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
        return plan(
            lengths,
            self._budget.allows(),
            max_batch_size,
            pads=self.model.pads,
            pass_tokens=self._pass_tokens,
            streams=self._streams,
            min_stream_tokens=self._min_stream_tokens,
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
