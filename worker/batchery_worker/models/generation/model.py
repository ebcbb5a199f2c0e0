"""The kind `generation` with the engine `transformers`."""

import itertools
import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as WITH_ENCODER,
)

from batchery.errors import OutOfMemory, PromptTooLong
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.model import Advance, StepModel
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.generation.prompts import (
    Prompts,
    ending_tokens,
    make_decoder,
    make_speller,
    read_bytes,
)
from batchery_worker.models.generation.rules import Rules
from batchery_worker.models.generation.sampling import (
    NO_TOKEN,
    choose_tokens,
    find_logprobs,
    penalize,
)
from batchery_worker.models.generation.texts import REPLACEMENT, Prompt, SlotText, TextJob
from batchery_worker.models.generation.trial import Candidate, choose_batch, generated_logits
from batchery_worker.models.hardware.devices import dtype_for, settle_cuda
from batchery_worker.models.inputs import GenerationKeywords, read_each, read_item, read_keywords
from batchery_worker.models.source import ModelSource, load_tokenizer, loading
from batchery_worker.models.split import open_split
from batchery_worker.models.text_length import longest_text

logger = logging.getLogger(__name__)

#: Maximum length of a text where the model has no limit, in tokens.
UNLIMITED_TOKENS = 32_768

#: How often a job may be in steps that are not finite, without a token between them. Where a plain
#: pass says nothing of it, its step might fail for ever.
MAX_DOUBTS = 3

#: The logarithm of the probability of a token that cannot be, as with OpenAI; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class GenerationModel(StepModel):
    """Writes texts with any decoder of transformers, by continuous batching.

    Models with an encoder as well have static batches.

    Items: see `Prompts.read`. Keywords of a job: see `GenerationKeywords`. A result has the shape
    of `batchery.Generation`; pieces have its `text`, and `tokens`.

    Attributes:
        max_length: Maximum length of a text in tokens, prompt included; with an encoder, of prompt
            and text each.
    """

    resumes = True

    max_length: int

    #: Of transformers.
    model: Any
    tokenizer: Any

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.slots = settings.slots or self.slots
        self._jobs: dict[int, TextJob] = {}
        self._texts: dict[str, SlotText] = {}
        self._serials = itertools.count()

    def load(self, device: str) -> None:
        """Loads the model, and finds out how its texts can be computed together.

        Raises:
            ModelLoadError: There is no model, it cannot write texts, its files ask for what cannot
                be done, or its numbers are not those of `generate`; one line says which.
            DeviceUnavailable: There is no such device.
        """
        with loading(self.settings.model):
            self._split = open_split(device, self.settings)
            self._device = self._split.device
            self._source = ModelSource(self.settings)
            self._load(self._source)

    def _load(self, source: ModelSource) -> None:
        if self._device.type == "cuda":
            settle_cuda()
        config = AutoConfig.from_pretrained(source.name, **source.options)
        self._check_config(config)
        self._split.begin(self, config)
        loader: Any = AutoModelForSeq2SeqLM if self.has_encoder else AutoModelForCausalLM
        dtype = dtype_for(self.settings.dtype, self._device)
        self.model, missing = source.load(loader, dtype=dtype, **self._split.options)
        if missing:
            raise ValueError(
                f"its checkpoint lacks {len(missing)} weights ({', '.join(missing[:2])}); name a"
                " model that was trained to write texts"
            )
        self._split.place(self.model)
        self.model.eval()
        self._rules = Rules(self.model, source)
        self._read_tokenizer(source)
        found = longest_text(self.settings, self.tokenizer, self.model)
        self.max_length = found or UNLIMITED_TOKENS
        known = range(min(len(self.tokenizer), self._vocabulary))
        special = {*self.tokenizer.all_special_ids, *self._endings}
        self._batch = choose_batch(
            Candidate(
                *(self.model, self.settings, self.slots, self.max_length),
                ordinary=[each for each in known if each not in special],
                may_graph=self._split.is_whole and self.settings.cuda_graphs == "auto",
            )
        )
        logger.info(
            "model %s: %d slots, %s, texts of up to %d tokens on %s, attention %s",
            *(self.settings.model, self.slots, self._batch.size),
            *(min(self.max_length, self._batch.capacity), self._device),
            self.model.config._attn_implementation,
        )

    def _check_config(self, config: Any) -> None:
        """Refuses what writes no texts. Raises ValueError."""
        names = config.architectures or []
        self.has_encoder = config.is_encoder_decoder
        written = WITH_ENCODER if self.has_encoder else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if names and not self.settings.trust_remote_code and not {*written.values()} & {*names}:
            raise ValueError(
                f"is a {names[0]}, and generation takes models that write texts (...ForCausalLM,"
                " ...ForConditionalGeneration); name one, or choose another kind"
            )
        for name in ("cache_tokens", "max_batch_tokens"):
            if self.has_encoder and getattr(self.settings, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for a model with an encoder; take it away, and limit"
                    " its batches by slots"
                )

    def _read_tokenizer(self, source: ModelSource) -> None:
        defaults = self.model.generation_config
        self._vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.tokenizer = load_tokenizer(source)
        self._endings = ending_tokens(defaults, self.tokenizer)
        self._penalty = float(defaults.repetition_penalty or 1.0)
        self._decode = make_decoder(self.tokenizer)
        self._spell = make_speller(self.tokenizer)
        self._prompts = Prompts(self.tokenizer, self._vocabulary, self.settings.max_chars)

    def version(self) -> str:
        """Changes with the model's files and options."""
        return self._source.version()

    def identity(self) -> str:
        """The content of the model's files, and how it is run."""
        return self._source.identity(self.model, {"device": self._device.type})

    def preprocess(self, items: Sequence[Any], **keywords: Any) -> list[Any]:
        """Reads items and keywords.

        Returns:
            A `Prompt` per item; `Failed` with an `InvalidItem` for each that cannot run.
        """

        def read(item: Any) -> Prompt:
            found = read_item(item)
            options = read_keywords(GenerationKeywords, {**keywords, **found.options})
            field = "messages" if found.messages else "prompt"
            return self._prompt(self._prompts.read(found), options, field)

        return read_each(items, read)

    def _prompt(
        self, tokens: list[int], options: GenerationKeywords, field: str = "prompt"
    ) -> Prompt:
        limits = {"cache_tokens": self._batch.capacity, "max_length": self.max_length}
        name = min(limits, key=limits.__getitem__)
        room = limits[name] - (0 if self.has_encoder else len(tokens))
        if room < (options.max_new_tokens or 1) or len(tokens) > limits[name]:
            each = "or" if self.has_encoder else "and"
            raise PromptTooLong(
                f"{field}: {len(tokens)} tokens {each} {options.max_new_tokens or 1} new ones"
                f" are more than {name} = {limits[name]}; send fewer"
                + (", or ask for fewer new ones" if options.max_new_tokens else "")
            )
        wanted = options.max_new_tokens or min(self.settings.max_new_tokens, room)
        return Prompt(tokens, options, wanted, options.repetition_penalty or self._penalty)

    def tokens(self, prepared: Prompt) -> int:
        """Length of the prompt."""
        return len(prepared.tokens)

    def join(self, slot: int, prepared: Prompt, pieces: Sequence[Any], **_: Any) -> None:
        """Takes a job in; see `StepModel.join`."""
        # The cache may have become smaller, and with it the text of a job that does not say.
        prepared = self._prompt(prepared.tokens, prepared.options)
        job = TextJob(slot, next(self._serials), prepared, self._decode)
        job.is_streamed = self.is_streamed
        for text in job.texts:
            text.resume(pieces, self._endings)
        self._jobs[slot] = job
        try:
            self._add(job)
        except Exception:
            # Some of its texts may be in the batch.
            self.leave(slot)
            raise

    def leave(self, slot: int) -> Sequence[Any] | None:
        """Drops a job; see `StepModel.leave`."""
        job = self._jobs.pop(slot)
        for text in job.texts:
            if self._texts.pop(text.name, None) is not None:
                self._batch.drop(text.name)
        return None if job.is_streamed else [text.take("") for text in job.texts]

    def _add(self, job: TextJob) -> None:
        """Has the texts of a job that have not ended written."""
        for text in job.texts:
            if text.finish_reason is None:
                if self._rules.hold:
                    text.rules = self._rules.read(text.prompt)
                elif job.prompt.penalty != 1:
                    text.penalize(self._vocabulary, self._device)
                self._texts[text.name] = text
                self._batch.add(text.name, text.prompt, text.tokens)

    def step(self) -> list[Advance]:
        """Computes the next token of each text.

        Where the memory is short, the cache becomes smaller, and all texts go on from their tokens.
        """
        # Those that came with all their pieces, but without their results.
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
                if token != NO_TOKEN:
                    advances += self._advance(text, token)
            if NO_TOKEN in tokens:
                advances += self._weed_out()
            # Some job says that the model does not hang, although nothing has come for anybody.
            return advances or [Advance(slot) for slot in itertools.islice(self._jobs, 1)]
        return advances + self._shrink(failure)

    def _choose(self, texts: Sequence[SlotText], logits: Tensor) -> list[int]:
        for row, text in enumerate(texts):
            if text.rules:
                logits[row] = self._rules.apply(text, logits[row])
        samplings = [text.sampling() for text in texts]
        scores = penalize(logits, samplings)
        tokens = choose_tokens(scores, samplings)
        widths = [text.prompt.options.logprobs for text in texts]
        rows = [row for row, width in enumerate(widths) if width is not None]
        rows = [row for row in rows if tokens[row] != NO_TOKEN]
        if rows:
            width = max(each for each in widths if each is not None)
            chosen = [tokens[row] for row in rows]
            values = zip(*find_logprobs(scores[rows], chosen, width), strict=True)
            for row, token, (own, likeliest, theirs) in zip(rows, chosen, values, strict=True):
                top = list(zip(likeliest, theirs, strict=True))[: widths[row]]
                self._note_logprob(texts[row], token, own, top)
        return tokens

    def _note_logprob(
        self, text: SlotText, token: int, own: float, likeliest: Sequence[tuple[int, float]]
    ) -> None:
        """Remembers the probability of a token, and those of the likeliest ones."""
        ids = [token, *(each for each, _ in likeliest)]
        spelled = [(self._spell(each, not text.tokens), each) for each in ids]
        values = [max(value, LEAST_LOGPROB) for value in (own, *(value for _, value in likeliest))]
        top = [[*each, value] for each, value in zip(spelled[1:], values[1:], strict=True)]
        found = {"token": spelled[0][0], "id": token, "logprob": values[0], "top": top}
        if any(REPLACEMENT in each for each, _ in spelled):
            found["bytes"] = [read_bytes(self.tokenizer, id_, each) for each, id_ in spelled]
        text.logprobs.append(found)

    def _advance(self, text: SlotText, token: int) -> list[Advance]:
        """What became of a text; nothing if its job has ended in this step."""
        job = text.job
        if self._jobs.get(job.slot) is not job:
            return []
        job.note_token()
        released = text.add(token, self._endings)
        piece = text.piece(released) if job.is_streamed else None
        advances = [] if piece is None else [Advance(job.slot, piece)]
        if text.finish_reason is not None:
            del self._texts[text.name]
            self._batch.drop(text.name)
            if job.has_ended:
                advances.append(self._end(job))
        return advances

    def _end(self, job: TextJob) -> Advance:
        del self._jobs[job.slot]
        return Advance(job.slot, outcome=job.result())

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
            job.doubts += 1
            if job.doubts <= MAX_DOUBTS and all(map(self._is_finite, growing)):
                self._add(job)
            else:
                self.leave(job.slot)
                problem = f"the model's output is not finite in {self.model.dtype}"
                advances.append(Advance(job.slot, outcome=Failed(problem)))
        return advances

    def _is_finite(self, text: SlotText) -> bool:
        read, written = text.prompt.tokens, text.tokens
        if not self.has_encoder:
            read, written = read + written, []
        return bool(generated_logits(self.model, read, written)[-1].isfinite().all())

    def _shrink(self, failure: str) -> list[Advance]:
        """Goes on with a smaller cache; a job that is alone and has no memory even so, fails."""
        jobs = list(self._jobs.values())
        needed = max(len(job.prompt.tokens) + job.prompt.max_new_tokens for job in jobs)
        self._texts.clear()
        if not self._batch.shrink(needed):
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
