"""Steps as CUDA graphs: those with one token for each text, and those with prompts.

Without a graph the host launches some hundred kernels for each step, and the GPU waits for it.
transformers has such steps for packages of kernels that are no part of it: its scheduler says which
steps have one token for each text, and its runner keeps a graph for each size.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.utils import pad_to_interval, pad_to_pow2

from batchery.execution.bisect_failures import is_out_of_memory
from batchery_worker.models.forward.cuda_graphs import capture_into
from batchery_worker.models.source import reason

logger = logging.getLogger(__name__)

#: Sizes of steps with prompts are multiples of this, and of an eighth of the power of two above, in
#: tokens: a long step is at most a quarter longer than its prompts.
MIN_TOKENS = 64

#: Smallest and largest number of keys in the cache that such a step reads, in tokens: few prompts
#: share their beginning with others. Each power of two between is one more graph for each size.
MIN_KEYS, MAX_KEYS = 4096, 16_384


class GraphedSteps:
    """Has transformers' batch processor take such steps as graphs; other steps are as they were."""

    def __init__(self, processor: Any, texts: int) -> None:
        """Captures nothing yet: a graph is captured when a step first has its size.

        Args:
            processor: Of transformers, whose cache has room for tables of pages.
            texts: Maximum number of texts in a step.
        """
        outputs, runner = processor.inputs_and_outputs, processor.model_runner
        # The processor has this object's methods, and must be freed as soon as nobody needs it.
        self._processor = weakref.proxy(processor)
        self._texts = texts
        (cache,) = processor.cache.cache_allocators.values()
        self._cache = weakref.proxy(cache)
        self._stride = cache.block_physical_stride // cache.tokens_per_page
        #: Pages of each row, as they are in the tables.
        self._pages: list[list[int]] = []
        self._tables = np.zeros(outputs.block_table.shape[1:], dtype=np.int32)
        self._rows = 0
        processor.cache.fill_block_table = self._note_pages
        runner.maybe_pad_inputs = self._pad
        # Sizes of keys that a graph has for all lengths.
        outputs.use_cuda_graph_varlen = True
        #: Kinds of steps that can be captured: whether each text gets one token.
        self.kinds = {True, False} if outputs.device.type == "cuda" else set[bool]()
        #: Sizes of steps for whose graph there was no memory.
        self._too_large: set[tuple[int, ...]] = set()
        if self.kinds:
            self._pool = torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(outputs.device)  # type: ignore[no-untyped-call]
            runner._capture_graph = self._capture

    def _pad(self, tokens: int, keys: int, is_decode: bool) -> tuple[int, int]:
        """How large a step is: a size that has a graph, if it can be captured."""
        self._rows = 0
        runner = self._processor.model_runner
        runner.pad_inputs = is_decode in self.kinds and (is_decode or keys <= MAX_KEYS)
        runner.use_cuda_graph_decode = runner.use_cuda_graph_varlen = runner.pad_inputs
        if not runner.pad_inputs:
            return tokens, keys
        if is_decode:
            return pad_to_pow2(tokens, self._texts), 0
        cache = runner.cache
        # Where no text has anything in the cache, nothing is read from it.
        read = pad_to_pow2(keys, cache.max_tokens_read, MIN_KEYS) if keys else 0
        return pad_tokens(tokens, cache.max_batch_tokens), read

    def _note_pages(self, name: str, *_: object) -> None:
        pages = self._cache.block_table[name]
        row = self._rows
        self._rows += 1
        if row == len(self._pages):
            self._pages.append([])
        if self._pages[row] != pages:
            self._tables[row, : len(pages)] = np.array(pages) * self._stride
            self._pages[row] = [*pages]

    def send_inputs(self) -> None:
        """Sends the tables of the step that was prepared to its device; must precede it."""
        outputs = self._processor.inputs_and_outputs
        if self._processor.model_runner.pad_inputs and not outputs.use_block_table:
            # One graph is for all lengths of texts: the kernel looks only whether there are keys.
            longest = self._processor.cache.max_tokens_read
            outputs.max_length_k = dict.fromkeys(outputs.max_length_k, longest)
        if self._rows:
            widest = max(map(len, self._pages[: self._rows]))
            tables = torch.from_numpy(self._tables[: self._rows, :widest].copy())
            target = outputs.block_table[0]
            target[: self._rows, :widest] = tables.to(target.device)

    def _capture(self, forward: Callable[..., None], _: object, *inputs: Any) -> None:
        """Takes this step as usual, and captures it; if that fails, none of its kind is."""
        forward(*inputs)
        outputs = self._processor.inputs_and_outputs
        size = outputs._get_graph_key()
        if size in self._too_large:
            return
        graph = torch.cuda.CUDAGraph()
        try:
            capture_into(graph, self._pool, self._side, lambda: forward(*inputs))
        except Exception as error:  # noqa: BLE001 (the code of any model, and of CUDA)
            # Some versions of torch capture nothing more into a pool after a failure.
            self._pool = torch.cuda.graph_pool_handle()
            kind = "with one token for each text" if outputs.use_block_table else "with prompts"
            if is_out_of_memory(error):
                kind = f"{kind}, of size {size},"
                self._too_large.add(size)
            else:
                self.kinds.discard(outputs.use_block_table)
            logger.warning("steps %s are launched without CUDA graphs: %s", kind, reason(error))
        else:
            outputs.set_graph(graph)


def pad_tokens(tokens: int, most: int) -> int:
    """The size of a step with prompts, in tokens.

    Args:
        tokens: Those of its prompts.
        most: Maximum of any step.
    """
    return pad_to_interval(tokens, max(MIN_TOKENS, pad_to_pow2(tokens, most) // 8), most)
