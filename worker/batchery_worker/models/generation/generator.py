"""What all engines of the kind `generation` share: items, keywords, slots, texts that grow."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import GenerationConfig

from batchery.errors import InvalidItem, ModelLoadError, PromptTooLong, StartError
from batchery.model import Advance, StepModel
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.generation.growing_text import REPLACEMENT
from batchery_worker.models.generation.prompts import (
    Prompts,
    ending_tokens,
    is_chat,
    make_decoder,
    make_speller,
    read_bytes,
)
from batchery_worker.models.generation.texts import Prompt, SlotText, TextJob
from batchery_worker.models.hardware.devices import device_named
from batchery_worker.models.inputs import GenerationKeywords, read_keywords, split_options
from batchery_worker.models.source import ModelSource, name_version, quiet, reason
from batchery_worker.models.tokenizer import load_tokenizer

#: The logarithm of the probability of a token that cannot be, as with OpenAI; JSON has no infinity.
LEAST_LOGPROB = -9999.0


class TextGenerator(StepModel):
    """Writes texts; subclasses are engines, which say what the next tokens are.

    Items: see `Prompts.read`. A result has the shape of `batchery.Generation`; pieces have its
    `text`, and `tokens`.

    Attributes:
        max_length: Maximum length of a text in tokens, prompt included.
    """

    #: The keywords that a job of it may have.
    keywords: ClassVar[type[GenerationKeywords]] = GenerationKeywords

    #: Whether it reads files of the format GGUF.
    takes_gguf: ClassVar[bool] = False

    resumes = True

    max_length: int

    #: Whether prompts are read by an encoder: limits hold for a prompt and for its text, each.
    has_encoder = False

    #: Of transformers.
    tokenizer: Any

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.slots = settings.slots or self.slots
        self._jobs: dict[int, TextJob] = {}
        self._texts: dict[str, SlotText] = {}
        self._serials = itertools.count()

    def load(self, device: str) -> None:
        """Loads the tokenizer, and starts the engine.

        Raises:
            ModelLoadError: There is no model, it cannot write texts, or its engine does not start;
                one line says which.
            DeviceUnavailable: There is no such device.
        """
        self._open_device(device)
        try:
            with quiet():
                self._source = ModelSource(self.settings, takes_gguf=self.takes_gguf)
                self._load(self._source)
        except StartError:
            raise
        except Exception as error:
            raise ModelLoadError(f"model {self.settings.model!r}: {reason(error)}") from error

    def _open_device(self, device: str) -> None:
        """Opens the device."""
        self._device = device_named(device)

    def version(self) -> str:
        """Changes with the model's files and options."""
        return name_version(self.settings, self._source)

    def _load(self, source: ModelSource) -> None:
        """Starts the engine."""
        raise NotImplementedError

    def _add(self, job: TextJob) -> None:
        """Has the engine write the texts of a job that have not ended, and registers them."""
        raise NotImplementedError

    def _drop(self, name: str) -> None:
        """Has the engine forget a text."""
        raise NotImplementedError

    def _limits(self) -> dict[str, int]:
        """How long a text may be, in tokens, by the names of the settings that say so."""
        return {"max_length": self.max_length}

    def _read_tokenizer(self, source: ModelSource, defaults: GenerationConfig, count: int) -> None:
        """Loads the tokenizer.

        Args:
            source: The model's files.
            defaults: What the model says of its texts.
            count: How many tokens the model knows.
        """
        self.tokenizer = load_tokenizer(source)
        self._endings = ending_tokens(defaults, self.tokenizer)
        self._penalty = float(defaults.repetition_penalty or 1.0)
        self._decode = make_decoder(self.tokenizer)
        self._spell = make_speller(self.tokenizer)
        self._prompts = Prompts(self.tokenizer, count, self.settings.max_chars)

    def preprocess(self, items: Sequence[Any], **keywords: Any) -> list[Any]:
        """Reads items and keywords.

        Returns:
            A `Prompt` per item; `Failed` with an `InvalidItem` for each that cannot run.
        """
        prepared: list[Any] = []
        for item in items:
            try:
                content, own = split_options(item)
                options = read_keywords(self.keywords, {**keywords, **own})
                field = "messages" if is_chat(content) else "prompt"
                prepared.append(self._prompt(self._prompts.read(content), options, field))
            except InvalidItem as error:
                prepared.append(Failed(type(error)(str(error))))
        return prepared

    def _prompt(
        self, tokens: list[int], options: GenerationKeywords, field: str = "prompt"
    ) -> Prompt:
        limits = self._limits()
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
        return Prompt(tokens, options, wanted)

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
                self._drop(text.name)
        return None if job.is_streamed else [text.take_rest() for text in job.texts]

    def _end_resumed(self) -> list[Advance]:
        """Ends the jobs that came with all their pieces, but without their results."""
        return [self._end(job) for job in list(self._jobs.values()) if job.has_ended]

    def _advance(self, text: SlotText, token: int) -> list[Advance]:
        """What became of a text; nothing if its job has ended in this step."""
        job = self._jobs.get(text.slot)
        if job is None or text not in job.texts:
            return []
        job.note_token()
        return self._show(text, text.add(token, self._endings))

    def _show(self, text: SlotText, released: str) -> list[Advance]:
        """A piece of a text; and the result of its job, if that has ended."""
        job = self._jobs[text.slot]
        piece = text.piece(released) if job.is_streamed else None
        advances = [] if piece is None else [Advance(job.slot, piece)]
        if text.finish_reason is not None:
            del self._texts[text.name]
            self._drop(text.name)
            if job.has_ended:
                advances.append(self._end(job))
        return advances

    def _sign(self) -> list[Advance]:
        """Says that the model does not hang, although nothing has come for anybody."""
        return [Advance(slot) for slot in itertools.islice(self._jobs, 1)]

    def _fail(self, job: TextJob, why: Any) -> Advance:
        self.leave(job.slot)
        return Advance(job.slot, outcome=Failed(why))

    def _end(self, job: TextJob) -> Advance:
        del self._jobs[job.slot]
        return Advance(job.slot, outcome=job.result())

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
