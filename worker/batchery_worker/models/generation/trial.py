"""How the texts of a model are computed together: by the fastest attention that is proven right."""

import gc
import logging
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from batchery.errors import ModelLoadError
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.settings import ModelSettings
from batchery_worker.models.generation.static_batch import StaticBatch
from batchery_worker.models.generation.texts import Prompt
from batchery_worker.models.inputs import GenerationKeywords
from batchery_worker.models.source import reason

try:
    from batchery_worker.models.generation.paged_attention import attentions, plain_attention
    from batchery_worker.models.generation.paged_batch import (
        STEP_TOKENS,
        PagedBatch,
        choose_cache_tokens,
    )
except ImportError as error:
    raise ModelLoadError(
        f"kind = 'generation' needs transformers 5.23 or newer and psutil: {error};"
        " pip install -U transformers psutil"
    ) from error

logger = logging.getLogger(__name__)

#: Texts that a model has in common steps when it is loaded, by their tokens: of the prompt, and
#: behind it. The first one ends on another page of the cache than its prompt.
TRIAL_TOKENS = ((250, 8), (9, 6), (1, 3))

#: How far logits may be from those of `generate`, as shares of their own spread: so far in any
#: model, and no farther in any. Between both it is a multiple of how far `generate` is from a pass
#: without a cache, which is rounding.
SURE = {torch.float32: 3e-4, torch.bfloat16: 0.12, torch.float16: 0.02}
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.2, torch.float16: 0.1}
ROUNDINGS = 8


class Candidate(NamedTuple):
    """A model that needs a batch.

    Attributes:
        model: Of transformers, on its device.
        settings: Its settings.
        slots: Maximum number of its texts in a step.
        max_length: Maximum length of a text in tokens.
        ordinary: Its tokens that are not special.
        may_graph: Whether its steps may be CUDA graphs.
    """

    model: Any
    settings: ModelSettings
    slots: int
    max_length: int
    ordinary: Sequence[int]
    may_graph: bool


def choose_batch(candidate: Candidate) -> PagedBatch | StaticBatch:
    """Makes the batch of a model, with an attention that gives the numbers of `generate`.

    Raises:
        ValueError: There is none.
    """
    *fast, usual = attentions(candidate.model, candidate.may_graph)
    for attention in fast:
        try:
            return _try_attention(candidate, attention)
        except Exception as error:  # noqa: BLE001 (the code of any model, and of CUDA)
            logger.info("model %s: not by %s: %s", candidate.settings.model, attention, error)
        # The next one chooses the size of its cache by the memory that is free. A batch holds
        # itself, through methods that it has given to transformers.
        gc.collect()
        torch.cuda.empty_cache()
    return _try_attention(candidate, usual)


def _try_attention(candidate: Candidate, attention: str) -> PagedBatch | StaticBatch:
    """Makes a batch with this attention, and has it write texts that share their steps.

    Raises:
        ValueError: The model fails in a step, or its numbers are not those of `generate`.
    """
    model = candidate.model
    model.config._attn_implementation = attention
    try:
        batch = _make_batch(candidate)
        if isinstance(batch, PagedBatch):
            # What is compared is replayed, then.
            _warm_up(batch, candidate.max_length)
        texts = _trial_texts(candidate, batch.capacity)
        found = _batched_logits(batch, texts)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"its texts cannot be computed together, each at its own place: {type(error).__name__}:"
            f" {reason(error)}"
        ) from error
    right = [generated_logits(model, prompt, written) for prompt, written in texts]
    allowed = max(SURE[model.dtype], ROUNDINGS * _find_rounding(model, *texts[1], right[1]))
    for difference in map(_compare, found, right):
        # Written so that NaN fails.
        if not difference < min(allowed, TOLERANCE[model.dtype]):
            raise ValueError(
                f"beside other texts it gives other tokens than alone ({difference:.2g} of the"
                " spread of its logits); it cannot be batched"
            )
    return batch


def _compare(logits: Tensor, right: Tensor) -> float:
    """The greatest difference, as a share of the spread of the right ones."""
    return float(((logits - right).abs().amax(dim=-1) / right.std(dim=-1)).max())


@torch.no_grad()
def _find_rounding(model: Any, prompt: list[int], written: list[int], right: Tensor) -> float:
    """How far a decoder is from `right` where it reads all tokens of a text at once."""
    if model.config.is_encoder_decoder:
        return torch.inf
    read = torch.tensor([prompt + written], device=model.device)
    with plain_attention(model):
        logits: Tensor = model(read, use_cache=False).logits[0, -len(right) :]
    return _compare(logits.float(), right)


def _make_batch(candidate: Candidate) -> PagedBatch | StaticBatch:
    model, settings = candidate.model, candidate.settings
    if model.config.is_encoder_decoder:
        return StaticBatch(model, candidate.slots)
    step_tokens = settings.max_batch_tokens or STEP_TOKENS[model.device.type]
    wanted = candidate.slots * candidate.max_length
    cache_tokens = settings.cache_tokens or choose_cache_tokens(model, wanted, step_tokens)
    return PagedBatch(model, candidate.slots, cache_tokens, step_tokens)


def _warm_up(batch: PagedBatch, max_length: int) -> None:
    """Runs the usual steps; where the memory is short for one, with a smaller cache."""
    while True:
        try:
            batch.warm_up()
        except Exception as error:
            if not is_out_of_memory(error) or not batch.shrink(max_length):
                raise
        else:
            return


def _trial_texts(candidate: Candidate, capacity: int) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what is written behind them; always the same."""
    draw = random.Random(0)
    room = min(candidate.max_length, capacity)
    texts = []
    for read, written in TRIAL_TOKENS:
        tokens = draw.choices(candidate.ordinary, k=min(read + written, room))
        # The last token that is computed is never read.
        steps = min(written, len(tokens) - 1)
        texts.append((tokens[: len(tokens) - steps], tokens[len(tokens) - steps :]))
    return texts


def _batched_logits(
    batch: PagedBatch | StaticBatch, texts: Sequence[tuple[list[int], list[int]]]
) -> list[Tensor]:
    """The same as `generated_logits`, of texts that begin together."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for number, (prompt, _) in enumerate(texts):
        batch.add(f"trial {number}", Prompt(prompt, GenerationKeywords(), 0))
    going = {f"trial {number}": number for number in range(len(texts))}
    while going:
        names, logits = batch.forward()
        numbers = [going[name] for name in names]
        tokens = []
        for number, row in zip(numbers, logits, strict=True):
            found[number].append(row.clone())
            tokens.append([*texts[number][1], 0][len(found[number]) - 1])
        batch.accept(tokens)
        for name, number in zip(names, numbers, strict=True):
            if len(found[number]) > len(texts[number][1]):
                batch.drop(name)
                del going[name]
    return [torch.stack(rows) for rows in found]


@torch.no_grad()
def generated_logits(model: Any, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
    """What `generate` computes for a text that is alone, and has these tokens.

    Args:
        model: Of transformers.
        prompt: Tokens that it reads.
        written: Tokens that it is made to write.

    Returns:
        Logits of the token that follows the prompt, and of each behind one that was written:
        (1 + len(written), V) float32.
    """
    chosen = iter([*written, 0])

    def force(_: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(chosen)] = 0
        return forced

    read = torch.tensor([prompt], device=model.device)
    own = model.generation_config
    # As the tokens are given, nothing else of it matters.
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        decoder_start_token_id=own.decoder_start_token_id, bos_token_id=own.bos_token_id
    )
    try:
        with plain_attention(model):
            outputs = model.generate(
                read,
                attention_mask=torch.ones_like(read),
                max_new_tokens=len(written) + 1,
                logits_processor=LogitsProcessorList([force]),
                output_logits=True,
                return_dict_in_generate=True,
            )
    finally:
        model.generation_config = own
    return torch.stack([logits[0] for logits in outputs.logits])
