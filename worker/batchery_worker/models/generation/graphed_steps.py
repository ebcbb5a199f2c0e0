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
from transformers.generation.continuous_batching.utils import pad_to_pow2

from batchery_worker.models.forward.cuda_graphs import capture_into
from batchery_worker.models.source import reason

logger = logging.getLogger(__name__)

#: Smallest size of a step with prompts, in tokens.
MIN_TOKENS = 16

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
        self._kinds = {True, False} if outputs.device.type == "cuda" else set[bool]()
        if self._kinds:
            self._pool = torch.cuda.graph_pool_handle()
            self._side = torch.cuda.Stream(outputs.device)  # type: ignore[no-untyped-call]
            runner._capture_graph = self._capture

    def _pad(self, tokens: int, keys: int, is_decode: bool) -> tuple[int, int]:
        """How large a step is: the next power of two of its texts, or of its tokens and keys."""
        self._rows = 0
        runner = self._processor.model_runner
        runner.pad_inputs = is_decode or keys <= MAX_KEYS
        runner.use_cuda_graph_decode = True in self._kinds
        runner.use_cuda_graph_varlen = runner.pad_inputs and False in self._kinds
        if is_decode:
            return pad_to_pow2(tokens, self._texts), 0
        if not runner.pad_inputs:
            return tokens, keys
        cache = runner.cache
        # Where no text has anything in the cache, nothing is read from it.
        read = pad_to_pow2(keys, cache.max_tokens_read, MIN_KEYS) if keys else 0
        return pad_to_pow2(tokens, cache.max_batch_tokens, MIN_TOKENS), read

    def _note_pages(self, name: str, *_: object) -> None:
        pages = self._cache.block_table[name]
        row = self._rows
        self._rows += 1
        if row == len(self._pages):
            self._pages.append([])
        if self._pages[row] != pages:
            self._tables[row, : len(pages)] = np.array(pages) * self._stride
            self._pages[row] = [*pages]

    def send_tables(self) -> None:
        """Copies the tables of the step that was prepared to the device; must precede it."""
        if self._rows:
            widest = max(map(len, self._pages[: self._rows]))
            tables = torch.from_numpy(self._tables[: self._rows, :widest].copy())
            target = self._processor.inputs_and_outputs.block_table[0]
            target[: self._rows, :widest] = tables.to(target.device)

    def _capture(self, forward: Callable[..., None], _: object, *inputs: Any) -> None:
        """Takes this step as usual, and captures it; if that fails, none of its kind is."""
        forward(*inputs)
        outputs = self._processor.inputs_and_outputs
        graph = torch.cuda.CUDAGraph()
        try:
            capture_into(graph, self._pool, self._side, lambda: forward(*inputs))
        except Exception as error:  # noqa: BLE001 (the code of any model, and of CUDA)
            kind = "with one token for each text" if outputs.use_block_table else "with prompts"
            logger.warning("steps %s are launched without CUDA graphs: %s", kind, reason(error))
            self._kinds.discard(outputs.use_block_table)
        else:
            outputs.set_graph(graph)
