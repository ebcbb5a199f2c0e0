"""The kind `generation` with the engine `vllm`."""

import json
import logging
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from transformers import AutoConfig, GenerationConfig

from batchery.errors import InvalidItem, ItemFailed, ModelLoadError
from batchery.model import Advance
from batchery_worker.models.generation.generator import TextGenerator
from batchery_worker.models.generation.sampling import draw
from batchery_worker.models.generation.texts import SlotText, TextJob
from batchery_worker.models.generation.vllm_process import VllmProcess, visible_gpus
from batchery_worker.models.inputs import GenerationKeywords
from batchery_worker.models.source import ModelSource

logger = logging.getLogger(__name__)

#: How long a step waits for the engine, in seconds.
STEP_S = 0.05

#: vLLM's names of number formats.
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: Number of seeds, all of which vLLM takes.
SEEDS = 1 << 53

#: What the text must be, as vLLM calls it.
Structure = Literal["json", "regex", "choice", "grammar"]


class VllmKeywords(GenerationKeywords):
    """Keywords of a text generation job with vLLM.

    Attributes:
        min_p: Draw from tokens with at least this share of the likeliest one's probability.
        presence_penalty: Lowers the scores of tokens that the text has already: -2 to 2.
        frequency_penalty: The same, for each time that it has them.
        response_format: As OpenAI has it: `{"type": "json_object"}`, or with a `json_schema`.
        structured_outputs: As vLLM has it, with one of the keys of `Structure`.
    """

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    response_format: dict[str, Any] | None = None
    structured_outputs: (
        Annotated[dict[Structure, Any], Field(min_length=1, max_length=1)] | None
    ) = None


class VllmModel(TextGenerator):
    """Writes texts with vLLM, which runs in an environment of its own.

    Keywords of a job: see `VllmKeywords`.
    """

    keywords = VllmKeywords

    slots = 64

    def _load(self, source: ModelSource) -> None:
        settings = self.settings
        if settings.quantize != "none":
            raise ModelLoadError(
                f"model {settings.model!r}: quantize is not for the engine vllm; set"
                " engine_options.quantization"
            )
        config = AutoConfig.from_pretrained(source.name, **source.options)
        try:
            defaults = GenerationConfig.from_pretrained(source.name, **source.options)
        except OSError:
            defaults = GenerationConfig.from_model_config(config)
        self._read_tokenizer(source, defaults, config.get_text_config().vocab_size)
        setup = {"options": self._options(source), "cache_tokens": settings.cache_tokens}
        gpus = visible_gpus(str(self._device), settings.engine_options)
        self._engine = VllmProcess(settings.engine_python or "", setup, gpus)
        self.max_length = self._engine.facts["max_model_len"]
        #: Of texts that are computed anew: the tokens that are known already.
        self._known: dict[str, deque[int]] = {}
        logger.info(
            "model %s: %d slots, texts of up to %d tokens, by vLLM %s",
            *(settings.model, self.slots, self.max_length, self._engine.facts["version"]),
        )

    def _options(self, source: ModelSource) -> dict[str, Any]:
        settings = self.settings
        chosen = {
            "model": source.name,
            **source.options,
            # By itself vLLM would also load weights that are pickles.
            "load_format": "safetensors",
            "dtype": DTYPES[settings.dtype],
            "max_num_seqs": self.slots,
            "max_model_len": settings.max_length,
            "max_num_batched_tokens": settings.max_batch_tokens,
        }
        return {
            **{name: value for name, value in chosen.items() if value is not None},
            **settings.engine_options,
        }

    def unload(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def _add(self, job: TextJob) -> None:
        sampling = self._sampling(job)
        for text in job.texts:
            if text.finish_reason is not None:
                continue
            self._texts[text.name] = text
            tokens = text.known_tokens()
            if text.tokens and "structured_outputs" in sampling:
                # A grammar begins where vLLM begins to write.
                self._known[text.name], tokens = deque(text.tokens), job.prompt.tokens
            position = len(tokens) - len(job.prompt.tokens)
            own = {"max_tokens": job.prompt.max_new_tokens - position}
            if job.prompt.options.seed is not None:
                own["seed"] = int(draw(job.seed, text.choice, position) * SEEDS)
            self._engine.send("generate", text.name, tokens, {**sampling, **own})

    def _sampling(self, job: TextJob) -> dict[str, Any]:
        """The parameters of vLLM that all texts of a job share."""
        options = job.prompt.options
        assert isinstance(options, VllmKeywords)
        penalty = options.repetition_penalty or self._penalty
        names = {"temperature", "top_p", "top_k", "logprobs", "min_p"}
        names |= {"presence_penalty", "frequency_penalty"}
        sampling = {
            **options.model_dump(include=names),
            "repetition_penalty": penalty,
            # Where a text ends is the same for all engines.
            "ignore_eos": True,
            "stop_token_ids": [] if options.ignore_eos else sorted(self._endings),
        }
        if structured := read_structure(options):
            sampling["structured_outputs"] = structured
        return sampling

    def _drop(self, name: str) -> None:
        self._known.pop(name, None)
        self._engine.send("abort", name)

    def step(self) -> list[Advance]:
        """Collects what the engine has written.

        Raises:
            BatcheryError: The engine has died.
        """
        advances = self._end_resumed()
        events = self._engine.receive(0.0 if advances else STEP_S)
        for event in events:
            # One that was dropped meanwhile is not there any more.
            if (text := self._texts.get(event["name"])) is not None:
                advances += self._take(text, event)
        return advances or (self._sign() if events else [])

    def _take(self, text: SlotText, event: Mapping[str, Any]) -> list[Advance]:
        job = self._jobs[text.slot]
        if "error" in event:
            kind = InvalidItem if event["refused"] else ItemFailed
            return [self._fail(job, kind(f"vLLM: {event['error']}"))]
        advances: list[Advance] = []
        known = self._known.get(text.name, ())
        for at, token in enumerate(event["tokens"]):
            if known:
                if known.popleft() != token:
                    why = "it cannot go on after its pieces: vLLM has begun another text"
                    return [*advances, self._fail(job, ItemFailed(f"{why}; set a seed"))]
                continue
            if "logprobs" in event:
                own, likeliest = event["logprobs"][at]
                width = job.prompt.options.logprobs
                self._note_logprob(text, token, own, likeliest[:width])
            advances += self._advance(text, token)
            if text.finish_reason is not None:
                # Behind a stop string, or the end.
                return advances
        if "finish_reason" in event:
            advances += self._finish(text, event["finish_reason"])
        return advances

    def _finish(self, text: SlotText, why: str) -> list[Advance]:
        """Ends a text that vLLM has ended: by a grammar, or because something is wrong."""
        if why in ("stop", "length"):
            return self._show(text, text.end(why))
        job = self._jobs[text.slot]
        return [self._fail(job, ItemFailed(f"vLLM has ended it: {why}; its log may say why"))]


def read_structure(options: VllmKeywords) -> Mapping[Any, Any] | None:
    """What vLLM calls structured outputs, of the keywords of a job.

    Raises:
        InvalidItem: They are wrong; names the keyword.
    """
    wanted = options.response_format
    if wanted is None:
        return options.structured_outputs
    kind = wanted.get("type")
    if options.structured_outputs is not None:
        raise InvalidItem("response_format: structured_outputs is there, too; send one of them")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    schema = wanted.get("json_schema")
    if kind != "json_schema" or not isinstance(schema, Mapping) or "schema" not in schema:
        raise InvalidItem(
            "response_format: must be {'type': 'json_object'}, or {'type': 'json_schema',"
            f" 'json_schema': {{'schema': {{...}}}}}}, not {json.dumps(wanted):.80}"
        )
    return {"json": schema["schema"]}
