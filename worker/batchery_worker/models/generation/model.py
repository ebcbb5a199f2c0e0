"""The kind `generation` with the engine `transformers`."""

import gc
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as WITH_ENCODER,
)

from batchery.errors import ModelLoadError, OutOfMemory
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.model import Advance
from batchery.outcomes import Failed
from batchery_worker.models.generation.generator import TextGenerator
from batchery_worker.models.generation.rules import Rules, start_token
from batchery_worker.models.generation.sampling import NO_TOKEN, choose_tokens, logprobs
from batchery_worker.models.generation.static_batch import StaticBatch
from batchery_worker.models.generation.texts import Prompt, SlotText, TextJob
from batchery_worker.models.hardware.cpu_threads import StepThreads
from batchery_worker.models.hardware.devices import dtype_for, settle_cuda
from batchery_worker.models.hardware.quantization import quantize
from batchery_worker.models.inputs import GenerationKeywords
from batchery_worker.models.source import ModelSource, identity, reason
from batchery_worker.models.split import open_split
from batchery_worker.models.tokenizer import longest_text

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

#: Maximum length of a text where the model has no limit, in tokens.
UNLIMITED_TOKENS = 32_768

#: How often a job may be in steps that are not finite, without a token between them. Where a plain
#: pass says nothing of it, its step might fail for ever.
MAX_DOUBTS = 3

#: With how many tokens a model is compared with itself when it is loaded, and how many of them come
#: one by one, as when a text is written.
CHECKED_TOKENS, CHECKED_STEPS = 256, 32

#: How far the paged cache may be from a plain pass, as a share of the logits' own spread.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.2, torch.float16: 0.1}


class GenerationModel(TextGenerator):
    """Writes texts with any decoder of transformers, by continuous batching.

    Models with an encoder as well have static batches.

    Keywords of a job: see `GenerationKeywords`.
    """

    takes_gguf = True

    #: Of transformers.
    model: Any

    _batch: PagedBatch | StaticBatch

    #: Around what a step computes.
    _computing: Callable[[], AbstractContextManager[object]] = nullcontext

    def _open_device(self, device: str) -> None:
        self._split = open_split(device, self.settings)
        self._device = self._split.device

    def _load(self, source: ModelSource) -> None:
        if self._device.type == "cuda":
            settle_cuda()
        elif self._device.type == "cpu" and self._split.is_whole:
            self._computing = StepThreads(torch.get_num_threads()).step
        config = AutoConfig.from_pretrained(source.name, **source.options)
        self._check_config(config)
        self._split.begin(self, config)
        loader: Any = AutoModelForSeq2SeqLM if self.has_encoder else AutoModelForCausalLM
        self.model, info = loader.from_pretrained(
            source.name,
            dtype=dtype_for(self.settings.dtype, self._device),
            use_safetensors=True,
            output_loading_info=True,
            **source.options,
            **self._split.options,
        )
        if missing := sorted(info["missing_keys"]):
            raise ModelLoadError(
                f"model {source.name!r}: its checkpoint lacks {len(missing)} weights"
                f" ({', '.join(missing[:2])}); name a model that was trained to write texts"
            )
        if self.settings.quantize != "none":
            quantize(self.settings.model, self.model, self.settings.quantize, self._device)
        self._split.place(self.model)
        self.model.eval()
        embedded = self.model.get_input_embeddings().weight.shape[0]
        self._read_tokenizer(source, self.model.generation_config, embedded)
        found = longest_text(self.settings, source, self.tokenizer, self.model)
        self.max_length = found or UNLIMITED_TOKENS
        self._rules = Rules(self.model, self.settings.model)
        self._open_batch()

    def _check_config(self, config: Any) -> None:
        """Refuses what writes no texts. Raises ModelLoadError."""
        names = config.architectures or []
        self.has_encoder = config.is_encoder_decoder
        written = WITH_ENCODER if self.has_encoder else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if names and not self.settings.trust_remote_code and not {*written.values()} & {*names}:
            raise ModelLoadError(
                f"model {self.settings.model!r}: is a {names[0]}, and generation takes models that"
                " write texts (...ForCausalLM, ...ForConditionalGeneration); name one, or choose"
                " another kind"
            )
        for name in ("cache_tokens", "max_batch_tokens"):
            if self.has_encoder and getattr(self.settings, name) is not None:
                raise ModelLoadError(
                    f"model {self.settings.model!r}: {name} has no meaning for a model with an"
                    " encoder; take it away, and limit its batches by slots"
                )

    def _open_batch(self) -> None:
        self._vocabulary = self.model.get_input_embeddings().weight.shape[0]
        may_graph = self._split.is_whole and self.settings.cuda_graphs == "auto"
        *fast, usual = attentions(self.model, may_graph)
        for attention in fast:
            try:
                self._batch = self._try_attention(attention)
                break
            except Exception as error:  # noqa: BLE001 (the code of any model, and of CUDA)
                logger.info("model %s: not by %s: %s", self.settings.model, attention, error)
            # The next one chooses the size of its cache by the memory that is free. A batch holds
            # itself, through methods that it has given to transformers.
            gc.collect()
            torch.cuda.empty_cache()
        else:
            self._batch = self._try_attention(usual)
        logger.info(
            "model %s: %d slots, %s, texts of up to %d tokens on %s, attention %s",
            *(self.settings.model, self.slots, self._batch.size),
            *(min(self.max_length, self._batch.capacity), self._device),
            self.model.config._attn_implementation,
        )

    def _try_attention(self, attention: str) -> PagedBatch | StaticBatch:
        """Makes a batch with this attention, and compares it with a plain pass.

        Raises:
            ModelLoadError: transformers cannot batch with it, or its tokens are others.
        """
        self.model.config._attn_implementation = attention
        try:
            batch = self._make_batch()
            if isinstance(batch, PagedBatch):
                # What is compared is replayed, then.
                self._warm_up(batch)
            sample = self._sample(min(CHECKED_TOKENS, self.max_length, batch.capacity))
            read, written = sample[:-CHECKED_STEPS], sample[-CHECKED_STEPS:]
            plain = self._plain_logits(read, written)
            found = _batched_logits(batch, read, written)
            difference = ((found - plain).abs().amax(dim=-1) / plain.std(dim=-1)).max()
        except (ValueError, TypeError) as error:
            raise ModelLoadError(
                f"model {self.settings.model!r}: transformers has no continuous batching for it:"
                f" {reason(error)}"
            ) from error
        if not difference < TOLERANCE[self.model.dtype]:
            raise ModelLoadError(
                f"model {self.settings.model!r}: from a cache it gives other tokens than without"
                f" ({difference:.2g} of their spread); it cannot be batched"
            )
        return batch

    def _warm_up(self, batch: PagedBatch) -> None:
        """Runs the usual steps; where the memory is short for one, with a smaller cache."""
        is_built = True
        while True:
            try:
                if not is_built:
                    batch.build()
                batch.warm_up()
                return
            except Exception as error:
                if not is_out_of_memory(error) or not batch.shrink(self.max_length):
                    raise
                is_built = False

    def _make_batch(self) -> PagedBatch | StaticBatch:
        if self.has_encoder:
            return StaticBatch(self.model, self.slots)
        step_tokens = self.settings.max_batch_tokens or STEP_TOKENS[self._device.type]
        wanted = self.slots * self.max_length
        cache_tokens = self.settings.cache_tokens or choose_cache_tokens(
            self.model, wanted, step_tokens
        )
        return PagedBatch(self.model, self.slots, cache_tokens, step_tokens)

    @torch.no_grad()
    def _plain_logits(self, prompt: Sequence[int], written: Sequence[int]) -> Tensor:
        """Without a cache: of the token that follows the prompt, and each that was written.

        Returns:
            (1 + len(written), V) float32.
        """
        inputs = {"input_ids": [[*prompt, *written]]}
        if self.has_encoder:
            inputs = {
                "input_ids": [[*prompt]],
                "decoder_input_ids": [[start_token(self.model), *written]],
            }
        tensors = {name: torch.tensor(ids, device=self._device) for name, ids in inputs.items()}
        with plain_attention(self.model):
            logits: Tensor = self.model(**tensors, use_cache=False).logits[0].float()
        return logits[-1 - len(written) :]

    def _sample(self, count: int) -> list[int]:
        """So many ordinary tokens, always the same."""
        special = set(self.tokenizer.all_special_ids)
        ordinary = [each for each in range(len(self.tokenizer)) if each not in special]
        return random.Random(0).choices(ordinary, k=count)

    def identity(self) -> str:
        """The content of the model's files, and how it is run."""
        run = {"device": self._device.type, "dtype": str(self.model.dtype)}
        return identity(self.settings, self._source, run, self.model)

    def _limits(self) -> dict[str, int]:
        return {"cache_tokens": self._batch.capacity, "max_length": self.max_length}

    def _add(self, job: TextJob) -> None:
        penalty = job.prompt.options.repetition_penalty or self._penalty
        for text in job.texts:
            if text.finish_reason is None:
                if self._rules.hold:
                    text.rules = self._rules.read(text.prompt)
                elif penalty != 1:
                    text.penalize(self._vocabulary, self._device)
                self._texts[text.name] = text
                self._batch.add(text.name, text.prompt, text.tokens)

    def _drop(self, name: str) -> None:
        self._batch.drop(name)

    def step(self) -> list[Advance]:
        """Computes the next token of each text.

        Where the memory is short, the cache becomes smaller, and all texts go on from their tokens.
        """
        advances = self._end_resumed()
        try:
            with self._computing():
                names, logits = self._batch.forward()
                texts = [self._texts[name] for name in names]
                tokens = self._choose(texts, logits) if texts else []
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        else:
            self._batch.accept([max(token, 0) for token in tokens])
            for text, token in zip(texts, tokens, strict=True):
                if token != NO_TOKEN:
                    advances += self._advance(text, token)
            if NO_TOKEN in tokens:
                advances += self._weed_out()
            return advances or self._sign()
        return advances + self._shrink(failure)

    def _choose(self, texts: Sequence[SlotText], logits: Tensor) -> list[int]:
        for row, text in enumerate(texts):
            if text.rules:
                logits[row] = self._rules.apply(text, logits[row])
        samplings = [
            text.sampling(text.prompt.options.repetition_penalty or self._penalty) for text in texts
        ]
        tokens = choose_tokens(logits, samplings)
        widths = [text.prompt.options.logprobs for text in texts]
        rows = [row for row, width in enumerate(widths) if width is not None]
        rows = [row for row in rows if tokens[row] != NO_TOKEN]
        if rows:
            width = max(each for each in widths if each is not None)
            chosen = [tokens[row] for row in rows]
            values = zip(*logprobs(logits[rows], chosen, width), strict=True)
            for row, token, (own, likeliest, theirs) in zip(rows, chosen, values, strict=True):
                top = list(zip(likeliest, theirs, strict=True))[: widths[row]]
                self._note_logprob(texts[row], token, own, top)
        return tokens

    def _weed_out(self) -> list[Advance]:
        """Fails the jobs whose own output is not finite.

        In attention a number that is not finite spoils all texts of the step, and what the cache
        keeps of them. So all texts go on from their tokens, with a new cache. One that does not get
        on fails, too.
        """
        jobs = list(self._jobs.values())
        self._texts.clear()
        self._batch.build()
        advances = []
        for job in jobs:
            growing = [text for text in job.texts if text.finish_reason is None]
            logits = [self._plain_logits(each.prompt.tokens, each.tokens)[-1] for each in growing]
            job.doubts += 1
            if job.doubts <= MAX_DOUBTS and all(each.isfinite().all() for each in logits):
                self._add(job)
            else:
                problem = f"the model's output is not finite in {self.model.dtype}"
                advances.append(self._fail(job, problem))
        return advances

    def _shrink(self, failure: str) -> list[Advance]:
        """Goes on with a smaller cache; a job that is alone and has no memory even so, fails."""
        jobs = list(self._jobs.values())
        needed = max(len(job.prompt.tokens) + job.prompt.max_new_tokens for job in jobs)
        self._texts.clear()
        while self._batch.shrink(needed):
            try:
                self._batch.build()
                break
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        else:
            if len(jobs) > 1:
                # They run again, in smaller and smaller groups.
                raise MemoryError(failure)
            self._jobs.clear()
            self._batch.build()
            problem = (
                f"no memory for this text, even alone ({failure:.200}); use a shorter prompt, a"
                " smaller max_new_tokens or dtype, or a larger device"
            )
            return [Advance(jobs[0].slot, outcome=Failed(OutOfMemory(problem)))]
        logger.warning(
            "model %s: out of memory; it goes on with %s",
            *(self.settings.model, self._batch.size),
        )
        for job in jobs:
            self._add(job)
        return []


def _batched_logits(
    batch: PagedBatch | StaticBatch, prompt: list[int], written: list[int]
) -> Tensor:
    """The same as `_plain_logits`, step by step, with a cache."""
    batch.add("trial", Prompt(prompt, GenerationKeywords(), 0))
    found = []
    for token in (*written, 0):
        # A long prompt takes several steps.
        while not len(logits := batch.forward()[1]):
            batch.accept([])
        found.append(logits[0].clone())
        batch.accept([token])
    batch.drop("trial")
    return torch.stack(found)
