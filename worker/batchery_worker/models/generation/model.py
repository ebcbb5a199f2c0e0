"""The kind `generation` with the engine `transformers`."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchery.errors import InvalidItem, ModelLoadError, OutOfMemory, StartError
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.model import Advance, StepModel
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.generation.prompts import Prompts, ending_tokens, make_decoder
from batchery_worker.models.generation.sampling import NO_TOKEN, choose_tokens, logprobs
from batchery_worker.models.generation.texts import Prompt, SlotJob, SlotText
from batchery_worker.models.hardware.devices import device_named, dtype_for, settle_cuda
from batchery_worker.models.hardware.quantization import quantize
from batchery_worker.models.inputs import GenerationKeywords, read_keywords, split_options
from batchery_worker.models.source import ModelSource, identity, quiet, reason
from batchery_worker.models.tokenizer import load_tokenizer, longest_text

try:
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

#: How far the paged cache may be from a plain pass, as a share of the logits' own spread.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.2, torch.float16: 0.1}


class GenerationModel(StepModel):
    """Writes texts with any decoder of transformers, by continuous batching.

    Items: see `Prompts.read`. Keywords of a job: see `GenerationKeywords`. A result has the shape
    of `batchery.Generation`; pieces have its `text`, and `tokens`.
    """

    #: Of transformers.
    model: Any
    tokenizer: Any

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.slots = settings.slots or StepModel.slots
        self._jobs: dict[int, SlotJob] = {}
        self._texts: dict[str, SlotText] = {}
        self._serials = itertools.count()

    def load(self, device: str) -> None:
        """Loads tokenizer and weights, allocates the cache, and compares it with a plain pass.

        Raises:
            ModelLoadError: There is no model, it cannot write texts or not from a paged cache, or
                there is no memory for it; one line says which.
            DeviceUnavailable: There is no such device.
        """
        self._device = device_named(device)
        if self._device.type == "cuda":
            settle_cuda()
        try:
            with quiet():
                self._load(ModelSource(self.settings, takes_gguf=True))
        except StartError:
            raise
        except Exception as error:
            raise ModelLoadError(f"model {self.settings.model!r}: {reason(error)}") from error

    def _load(self, source: ModelSource) -> None:
        self._source = source
        config = AutoConfig.from_pretrained(source.name, **source.options)
        self._check_config(config)
        self.tokenizer = load_tokenizer(source)
        loader: Any = AutoModelForCausalLM
        self.model, info = loader.from_pretrained(
            source.name,
            dtype=dtype_for(self.settings.dtype, self._device),
            use_safetensors=True,
            output_loading_info=True,
            **source.options,
        )
        if missing := sorted(info["missing_keys"]):
            raise ModelLoadError(
                f"model {source.name!r}: its checkpoint lacks {len(missing)} weights"
                f" ({', '.join(missing[:2])}); name a model that was trained to write texts"
            )
        if self.settings.quantize != "none":
            quantize(self.settings.model, self.model, self.settings.quantize, self._device)
        self.model.to(self._device).eval()
        self._endings = ending_tokens(self.model, self.tokenizer)
        self._penalty = float(self.model.generation_config.repetition_penalty or 1.0)
        self._decode = make_decoder(self.tokenizer)
        embedded = self.model.get_input_embeddings().weight.shape[0]
        self._prompts = Prompts(self.tokenizer, embedded, self.settings.max_chars)
        found = longest_text(self.settings, source, self.tokenizer, self.model)
        self.max_length = found or UNLIMITED_TOKENS
        self._open_batch()

    def _check_config(self, config: Any) -> None:
        """Refuses what is no decoder. Raises ModelLoadError."""
        names = config.architectures or []
        known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        if config.is_encoder_decoder or not (
            self.settings.trust_remote_code or not names or known.intersection(names)
        ):
            kind = names[0] if names else type(config).__name__
            raise ModelLoadError(
                f"model {self.settings.model!r}: is a {kind}, and generation takes decoders alone"
                " (...ForCausalLM); name one, or choose another kind"
            )

    def _open_batch(self) -> None:
        step_tokens = self.settings.max_batch_tokens or STEP_TOKENS[self._device.type]
        wanted = self.slots * self.max_length
        cache_tokens = self.settings.cache_tokens or choose_cache_tokens(
            self.model, wanted, step_tokens
        )
        sample = self._prompts.read("a b c")[:3] * 2
        plain = self._plain_logits(sample)
        self._vocabulary = plain.shape[0]
        try:
            self._batch = PagedBatch(self.model, self.slots, cache_tokens, step_tokens)
            difference = (self._paged_logits(sample) - plain).abs().max() / plain.std()
        except (ValueError, TypeError) as error:
            raise ModelLoadError(
                f"model {self.settings.model!r}: transformers has no continuous batching for it:"
                f" {reason(error)}"
            ) from error
        if not difference < TOLERANCE[self.model.dtype]:
            raise ModelLoadError(
                f"model {self.settings.model!r}: from a paged cache it gives other tokens than"
                f" without ({difference:.2g} of their spread); it cannot be batched"
            )
        logger.info(
            "model %s: %d slots, %d tokens of cache, texts of up to %d tokens on %s",
            *(self.settings.model, self.slots, self._batch.cache_tokens),
            *(min(self.max_length, self._batch.capacity), self._device),
        )

    @torch.no_grad()
    def _plain_logits(self, tokens: list[int]) -> Tensor:
        inputs = torch.tensor([tokens], device=self._device)
        logits: Tensor = self.model(inputs, use_cache=False).logits[0, -1].float()
        return logits

    def _paged_logits(self, tokens: list[int]) -> Tensor:
        """The same after two steps: all tokens but the last, and the last one."""
        self._batch.add("trial", tokens[:-1])
        self._batch.forward()
        self._batch.accept(tokens[-1:])
        _, logits = self._batch.forward()
        self._batch.accept([0])
        self._batch.drop("trial")
        return logits[0]

    def identity(self) -> str:
        """The content of the model's files, and how it is run."""
        run = {"device": self._device.type, "dtype": str(self.model.dtype)}
        return identity(self.settings, self._source, run, self.model)

    def preprocess(self, items: Sequence[Any], **keywords: Any) -> list[Any]:
        """Reads items and keywords.

        Returns:
            A `Prompt` per item; `Failed` with an `InvalidItem` for each that cannot run.
        """
        prepared: list[Any] = []
        for item in items:
            try:
                content, own = split_options(item)
                options = read_keywords(GenerationKeywords, {**keywords, **own})
                prepared.append(self._prompt(self._prompts.read(content), options))
            except InvalidItem as error:
                prepared.append(Failed(InvalidItem(str(error))))
        return prepared

    def _prompt(self, tokens: list[int], options: GenerationKeywords) -> Prompt:
        limits = {"cache_tokens": self._batch.capacity, "max_length": self.max_length}
        name = min(limits, key=limits.__getitem__)
        room = limits[name] - len(tokens)
        if room < (options.max_new_tokens or 1):
            raise InvalidItem(
                f"prompt: its {len(tokens)} tokens and {options.max_new_tokens or 1} new ones are"
                f" more than {name} = {limits[name]}; shorten it"
                + (", or lower max_new_tokens" if options.max_new_tokens else "")
            )
        wanted = options.max_new_tokens or min(self.settings.max_new_tokens, room)
        return Prompt(tokens, options, wanted)

    def tokens(self, prepared: Prompt) -> int:
        """Length of the prompt."""
        return len(prepared.tokens)

    def join(self, slot: int, prepared: Prompt, pieces: Sequence[Any], **_: Any) -> None:
        """Takes a job in; see `StepModel.join`."""
        # The cache may have become smaller.
        self._prompt(prepared.tokens, prepared.options)
        job = SlotJob(slot, next(self._serials), prepared, self._decode)
        for text in job.texts:
            text.resume(pieces, self._endings)
        self._jobs[slot] = job
        self._add(job)

    def _add(self, job: SlotJob) -> None:
        penalty = job.prompt.options.repetition_penalty or self._penalty
        for text in job.texts:
            if text.finish_reason is None:
                if penalty != 1:
                    text.penalize(self._vocabulary, self._device)
                self._texts[text.name] = text
                self._batch.add(text.name, text.known_tokens())

    def leave(self, slot: int) -> None:
        """Drops a job; see `StepModel.leave`."""
        for text in self._jobs.pop(slot).texts:
            if self._texts.pop(text.name, None) is not None:
                self._batch.drop(text.name)

    def step(self) -> list[Advance]:
        """Computes the next token of each text.

        Where the memory is short, the cache becomes smaller, and all texts go on from their tokens.
        """
        # A job that came with all its pieces, but without its result.
        advances = [self._end(job) for job in list(self._jobs.values()) if job.has_ended]
        try:
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
                advances += self._advance(text, token)
            return advances
        return advances + self._shrink(failure)

    def _choose(self, texts: Sequence[SlotText], logits: Tensor) -> list[int]:
        samplings = [
            text.sampling(text.prompt.options.repetition_penalty or self._penalty) for text in texts
        ]
        tokens = choose_tokens(logits, samplings)
        widths = [text.prompt.options.logprobs for text in texts]
        rows = [row for row, width in enumerate(widths) if width is not None]
        if rows:
            width = max(each for each in widths if each is not None)
            chosen = [max(tokens[row], 0) for row in rows]
            values = zip(*logprobs(logits[rows], chosen, width), strict=True)
            for row, token, (own, likeliest, theirs) in zip(rows, chosen, values, strict=True):
                top = list(zip(likeliest, theirs, strict=True))[: widths[row]]
                texts[row].logprobs.append(
                    {
                        "token": self.tokenizer.decode([token]),
                        "id": token,
                        "logprob": own,
                        "top": [
                            [self.tokenizer.decode([each]), each, value] for each, value in top
                        ],
                    }
                )
        return tokens

    def _advance(self, text: SlotText, token: int) -> list[Advance]:
        """What became of a text; nothing if its job has ended in this step."""
        job = self._jobs.get(text.slot)
        if job is None or text not in job.texts:
            return []
        if token == NO_TOKEN:
            self.leave(job.slot)
            problem = f"the model's output is not finite in {self.model.dtype}"
            return [Advance(job.slot, outcome=Failed(problem))]
        job.note_token()
        piece = text.piece(text.add(token, self._endings))
        advances = [] if piece is None else [Advance(job.slot, piece)]
        if text.finish_reason is not None:
            del self._texts[text.name]
            self._batch.drop(text.name)
            if job.has_ended:
                advances.append(self._end(job))
        return advances

    def _end(self, job: SlotJob) -> Advance:
        del self._jobs[job.slot]
        return Advance(job.slot, outcome=job.result())

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
            "model %s: out of memory; it goes on with %d tokens of cache, %d tokens a step",
            *(self.settings.model, self._batch.cache_tokens, self._batch.step_tokens),
        )
        for job in jobs:
            self._add(job)
        return []
