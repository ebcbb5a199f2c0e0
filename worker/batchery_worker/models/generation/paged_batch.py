"""A batch that runs, over transformers' paged cache of keys and values.

transformers' own manager runs its loop on a thread, which ends with any error, and every request
with it. Here its parts are driven step by step: its scheduler chooses what a step computes, its
cache keeps keys and values, and shares those of equal beginnings. Tokens are chosen by the caller.
"""

from collections.abc import Sequence
from math import ceil
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from batchery.execution.bisect_failures import is_out_of_memory
from batchery_worker.models.generation.graphed_steps import MIN_TOKENS, GraphedSteps, pad_tokens
from batchery_worker.models.generation.paged_attention import (
    BY_PAGE,
    EAGER,
    OWN_EAGER,
    attend_as_defined,
)
from batchery_worker.models.generation.texts import Prompt
from batchery_worker.models.inputs import GenerationKeywords

#: Tokens of a page. What equal beginnings share is whole pages.
PAGE_TOKENS = 32

#: Tokens of one step, unless the settings say: of a long prompt so many are computed in each step,
#: and all other texts wait for them.
STEP_TOKENS = {"cpu": 256, "mps": 256, "cuda": 2048}

#: Share of the free memory that the cache and what comes with it may take.
MEMORY_SHARE = {"cpu": 0.25, "mps": 0.25, "cuda": 0.8}

#: What remains of the cache, and of the tokens of a step, where memory ran out.
SHRINK = 0.7


class PagedBatch:
    """Texts whose tokens are computed together, each at its own place.

    Attributes:
        cache_tokens: Of so many tokens keys and values are kept, at most.
        step_tokens: So many tokens are computed in one step, at most.
        capacity: Maximum tokens of one text, prompt included.
    """

    capacity: int

    _processor: Any
    _logits: Tensor | None
    _graphed: GraphedSteps | None
    #: Whether the last step was for prompts alone.
    _is_apart = False

    def __init__(self, model: Any, texts: int, cache_tokens: int, step_tokens: int) -> None:
        """Allocates the cache.

        Args:
            model: Of transformers, on its device.
            texts: Maximum number of texts in a step; others wait.
            cache_tokens: See above.
            step_tokens: See above.

        Raises:
            ValueError: The model has layers for which there is no such cache.
            MemoryError: There is no memory for this cache; torch has other errors for that, too.
        """
        self._model = model
        self._texts = texts
        self.cache_tokens = cache_tokens
        self.step_tokens = max(step_tokens, texts)
        self.build()

    def build(self) -> None:
        """Allocates a new cache, without any text; see `__init__` for its errors."""
        # The old cache must be gone before the new one is there.
        self._processor = self._logits = self._graphed = None
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=ceil(self.cache_tokens / PAGE_TOKENS),
            max_batch_tokens=self.step_tokens,
            max_requests_per_batch=self._texts,
            max_memory_percent=1.0,
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
        )
        # Nothing of the model's own configuration applies: tokens are not chosen there.
        own = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        if self._model.config._attn_implementation == OWN_EAGER:
            self._model.config._attn_implementation = EAGER
        manager = ContinuousBatchingManager(self._model, own, config)
        by_page = self._model.config._attn_implementation == BY_PAGE
        if by_page:
            # Given to the manager, it would look for a package of kernels by the attention's name.
            manager.continuous_batching_config.max_blocks_per_request = config.num_blocks
        self._processor = manager._create_batch_processor()
        # It copies inputs on the stream that is current, and would compute on one that does not
        # wait for them. Besides, libraries keep memory for each stream that they were used on.
        self._processor.inputs_and_outputs.compute_stream = None
        self._processor.model_runner._sample = self._keep
        self._graphed = GraphedSteps(self._processor, self._texts) if by_page else None
        if by_page or self._model.device.type == "cpu":
            self._processor.scheduler.schedule_batch = self._schedule
        attend_as_defined(self._model)
        self.capacity = infer_max_single_request_tokens(self._processor.cache)

    def warm_up(self) -> None:
        """Captures the steps that run as CUDA graphs, so that no job waits for it."""
        if self._graphed is None:
            return
        longest = min(self.step_tokens, self.capacity)
        sizes = {pad_tokens(each, longest) for each in range(1, longest + 1, MIN_TOKENS)}
        # The largest first, as the others find room in what it leaves.
        for number, tokens in enumerate(sorted(sizes, reverse=True)):
            # Each of other tokens: what equal prompts share would be read from the cache.
            self._add_trial("prompt", [number] * tokens)
            self._step_on()
            self.drop("prompt")
        names = [str(number) for number in range(self._texts)]
        for name in names:
            self._add_trial(name, [1])
        while names:
            self._step_on()
            # The largest power of two below.
            stay = 1 << (len(names) - 1).bit_length() >> 1
            for name in names[stay:]:
                self.drop(name)
            names = names[:stay]

    def _add_trial(self, name: str, tokens: list[int]) -> None:
        self.add(name, Prompt(tokens, GenerationKeywords(), 0))

    def _step_on(self) -> None:
        names, _ = self.forward()
        self.accept([0] * len(names))

    def _schedule(self, *room: int) -> Any:
        """Has a step compute prompts alone, if the step before was for others.

        So the first token of a text comes sooner. On a CPU that costs little with short prompts and
        saves time with long ones, as each token of a step looks at the keys of all its texts; all
        prompts must fit. With graphs, steps of both kinds are launched at once, and mixed ones are
        not: there both take turns.
        """
        scheduler = self._processor.scheduler
        texts = [*scheduler.waiting_requests.values(), *scheduler.active_requests.values()]
        growing = sum(each.status is RequestStatus.DECODING for each in texts)
        prompt_tokens = sum(len(each.remaining_prefill_tokens) for each in texts)
        has_graphs = self._graphed is not None and bool(self._graphed.kinds)
        fits = has_graphs or prompt_tokens <= self.step_tokens
        was_apart, self._is_apart = self._is_apart, False
        if growing and prompt_tokens and fits:
            # The cache keeps room for what is growing.
            has_room = growing < self._texts and scheduler._try_to_meet_safety_margin()
            self._is_apart = has_room and not was_apart
            if self._is_apart or has_graphs:
                chosen = self._schedule_kind(not self._is_apart, *room)
                if chosen[0]:
                    return chosen
        return type(scheduler).schedule_batch(scheduler, *room)

    def _schedule_kind(self, is_growing: bool, *room: int) -> Any:
        """Chooses among texts that grow, or among prompts, as if there were no others."""
        scheduler = self._processor.scheduler
        active, was_blocked = scheduler.active_requests, scheduler.block_new_requests
        before = {**active}
        for name, each in before.items():
            if (each.status is RequestStatus.DECODING) != is_growing:
                del active[name]
        scheduler.block_new_requests = was_blocked or is_growing
        if not is_growing:
            # Prompts become texts that grow, and no more of them than a step takes.
            scheduler.max_requests_per_batch -= len(before) - len(active)
        try:
            return type(scheduler).schedule_batch(scheduler, *room)
        finally:
            # In the order in which they began: those that are behind take their turn.
            began = {**before, **active}
            active.clear()
            active.update(began)
            scheduler.block_new_requests = was_blocked
            scheduler.max_requests_per_batch = self._texts

    def _keep(self, scores: Tensor, _: Tensor) -> None:
        found = scores[0]
        if self._graphed is None:
            self._logits = found
            return
        # Graphs need one place for all logits.
        if self._logits is None:
            self._logits = found.new_empty((self._texts, found.shape[1]))
        self._logits[: len(found)].copy_(found)

    @property
    def size(self) -> str:
        """For people."""
        return f"{self.cache_tokens} tokens of cache, {self.step_tokens} tokens a step"

    def add(self, name: str, prompt: Prompt, written: Sequence[int] = ()) -> None:
        """Takes a text in, which is part of the next step if there is room.

        Args:
            name: That no text had before.
            prompt: What it goes on from.
            written: Its tokens so far.
        """
        state = RequestState(name, [*prompt.tokens, *written], max_new_tokens=None)
        self._processor.scheduler.add_waiting_request(state)

    def drop(self, name: str) -> None:
        """Frees what a text holds."""
        scheduler = self._processor.scheduler
        scheduler.set_request_cancellation(name)
        scheduler.clear_cancelled_requests()
        # It was set because the cache was full.
        scheduler.block_new_requests = False

    @torch.no_grad()
    def forward(self) -> tuple[list[str], Tensor]:
        """Computes a step; `accept` must follow with a token for each name.

        Returns:
            The names of the texts whose next token can be chosen, and their logits, (B, V) float32.
            There are none if the step has only read a part of long prompts.
        """
        if not self._processor.prepare_next_batch():
            return [], torch.empty(0)
        if self._graphed is not None:
            self._graphed.send_inputs()
        self._processor._generation_step(self._model)
        batch = self._processor.inputs_and_outputs.requests_in_batch
        names = [each.state.request_id for each in batch if each.has_new_token]
        assert self._logits is not None
        return names, self._logits[: len(names)]

    def accept(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that were chosen after a step, in its order."""
        outputs = self._processor.inputs_and_outputs
        if outputs.requests_in_batch:
            outputs.output_ids[0, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            self._processor.update_batch()
            outputs.requests_in_batch = []

    def shrink(self, needed_tokens: int) -> bool:
        """Makes the cache so small that there is memory for it; all texts must be added again.

        Args:
            needed_tokens: The cache keeps at least so many.

        Returns:
            Whether it could; if not, there is none, and `build` must follow.
        """
        while True:
            self._processor = self._logits = self._graphed = None
            before = self.cache_tokens, self.step_tokens
            needed = min(self.cache_tokens, ceil(needed_tokens / PAGE_TOKENS) * PAGE_TOKENS)
            self.cache_tokens = max(needed, int(self.cache_tokens * SHRINK))
            self.step_tokens = max(self._texts, int(self.step_tokens * SHRINK))
            if (self.cache_tokens, self.step_tokens) == before:
                return False
            try:
                self.build()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return True


def choose_cache_tokens(model: Any, wanted_tokens: int, step_tokens: int) -> int:
    """Of how many tokens there is memory to keep keys and values.

    Args:
        model: Of transformers, on its device.
        wanted_tokens: More would be of no use.
        step_tokens: Of `PagedBatch`.
    """
    config = model.config.get_text_config()
    heads, width = find_num_key_value_heads(config), find_head_dim(config)
    # Besides keys and values there is a copy of one layer's, and the mask of a step.
    numbers = 2 * config.num_hidden_layers * heads * width + step_tokens
    numbers += (2 * config.num_attention_heads + heads) * width
    on_cuda = model.device.type == "cuda"
    free_bytes = (
        torch.cuda.mem_get_info(model.device)[0] if on_cuda else psutil.virtual_memory().available
    )
    usable_bytes = free_bytes * MEMORY_SHARE[model.device.type]
    return min(wanted_tokens, int(usable_bytes / (numbers * model.dtype.itemsize)))
