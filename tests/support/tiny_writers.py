"""Tiny models that write texts, with random weights, and how tests drive them step by step."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from batchery.outcomes import Failed
from support.tiny_models import BART, CORPUS, T5

#: Characters of one to four bytes.
FOREIGN = "Zürich, жизнь, 数字と日本語 🙂🚀 naïve façade"

#: As many models have it, with a role that it refuses.
TEMPLATE = (
    "{% if tools %}[tools {{ tools | length }}] {% endif %}"
    "{% for each in messages %}"
    "{% if each.role == 'developer' %}{{ raise_exception('no developer here') }}{% endif %}"
    "{{ each.role }} : {{ each.content }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)

#: Options of their configs, as far as they have them.
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 160,
    # Large weights, so that the likeliest token is so by far.
    "initializer_range": 0.4,
}

WINDOW: dict[str, Any] = {"sliding_window": 8}
CAP: dict[str, Any] = {"sliding_window": 64, "attn_logit_softcapping": 0.5}
EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "shared_expert_intermediate_size": 16,
}

#: Decoders, by the names of their types in transformers, and further options.
WRITERS: dict[str, dict[str, Any]] = {
    name: options
    for names, options in (
        ("apertus arcee biogpt bitnet cohere ernie4_5 gemma glm glm4 gpt2 gpt_neox granite", {}),
        ("helium hunyuan_v1_dense jais2 llama nanochat olmo olmo2 persimmon phi qwen2 qwen3", {}),
        ("smollm3 starcoder2", {}),
        ("cohere2 exaone4 gemma3_text mistral olmo3", WINDOW),
        ("phi3", {**WINDOW, "pad_token_id": 1}),
        ("gemma2 vaultgemma", CAP),
        # The first one has sinks.
        ("gpt_oss granitemoe mixtral olmoe qwen2_moe qwen3_moe", EXPERTS),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    )
    for name in names.split()
}

#: The same for models with an encoder; all of their options.
ENCODER_WRITERS: dict[str, dict[str, Any]] = {
    "t5": {**T5, "initializer_factor": 3.0},
    "bart": {**BART, "init_std": 0.4},
}

#: Of a generation config: the first token of a text, as mBART has it, and the last one, as BART.
FORCED = {"forced_bos_token_id": 70, "forced_eos_token_id": 1}


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte by byte, as most models have it: a character may be several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["[UNK]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]", chat_template=TEMPLATE
    )


def save_writer(folder: Path, architecture: str = "llama", **options: Any) -> Path:
    """Writes a model and its tokenizer; `options` are those of its config."""
    tokenizer = make_byte_tokenizer()
    end = tokenizer.eos_token_id
    has_encoder = architecture in ENCODER_WRITERS
    if has_encoder:
        known = {"decoder_start_token_id": end, **ENCODER_WRITERS[architecture]}
    else:
        usual = AutoConfig.for_model(architecture)
        known = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
        known |= WRITERS.get(architecture, {})
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": end, "pad_token_id": end}
    config = AutoConfig.for_model(
        architecture, **{"bos_token_id": None, **tokens, **known, **options}
    )
    loader: Any = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = loader.from_config(config)
    if architecture == "bart":
        model.generation_config.update(**FORCED)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class PlainWriter:
    """The same model as transformers runs it, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._has_encoder = AutoConfig.from_pretrained(folder).is_encoder_decoder
        loader: Any = AutoModelForSeq2SeqLM if self._has_encoder else AutoModelForCausalLM
        self.model = loader.from_pretrained(folder).eval()

    def generate(
        self, prompt: str, max_new_tokens: int, **options: Any
    ) -> tuple[list[int], torch.Tensor]:
        """The likeliest tokens, and the logarithms of what they were chosen by, (T, V).

        Options are those of `generate`.
        """
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"].to(self.model.device)
        found = self.model.generate(
            ids,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        # What begins an answer is no part of it.
        before = 1 if self._has_encoder else ids.shape[1]
        return found.sequences[0, before:].tolist(), torch.cat(found.scores).log_softmax(-1)

    def write(self, prompt: str, max_new_tokens: int, **options: Any) -> list[int]:
        """The likeliest tokens."""
        return self.generate(prompt, max_new_tokens, **options)[0]

    def text(self, tokens: Sequence[int]) -> str:
        """As readers see it."""
        return str(self.tokenizer.backend_tokenizer.decode(list(tokens)))


class Driver:
    """Drives a step model as a device process does."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.free = list(range(model.slots))
        #: Of each job that runs, by its slot.
        self.running: dict[int, Any] = {}
        self.outcomes: dict[Any, Any] = {}
        self.pieces: dict[Any, list[Any]] = {}

    def join(self, name: Any, item: Any, pieces: Sequence[Any] = (), **keywords: Any) -> None:
        """Takes a job in; an unfit one has its outcome at once."""
        (prepared,) = self.model.preprocess([item], **keywords)
        self.pieces[name] = []
        if isinstance(prepared, Failed):
            self.outcomes[name] = prepared
            return
        slot = self.free.pop()
        self.running[slot] = name
        self.model.join(slot, prepared, pieces, **keywords)

    def leave(self, name: Any) -> None:
        """Cancels a job."""
        slot = next(each for each, job in self.running.items() if job == name)
        del self.running[slot]
        self.model.leave(slot)
        self.free.append(slot)

    def step(self) -> None:
        """One step."""
        for slot, piece, outcome in self.model.step():
            if piece is not None:
                self.pieces[self.running[slot]].append(piece)
            if isinstance(outcome, dict | Failed):
                self.outcomes[self.running.pop(slot)] = outcome
                self.free.append(slot)

    def step_until_idle(self) -> None:
        """Steps until no job runs."""
        while self.running:
            self.step()

    def run(self, jobs: Iterator[tuple[Any, Any, dict[str, Any]]]) -> dict[Any, Any]:
        """Runs jobs (name, item, keywords), and returns their outcomes."""
        more = True
        while more or self.running:
            while more and self.free:
                job = next(jobs, None)
                more = job is not None
                if job is not None:
                    self.join(job[0], job[1], **job[2])
            self.step()
        return self.outcomes

    def one(self, item: Any, pieces: Sequence[Any] = (), **keywords: Any) -> Any:
        """The outcome of one job."""
        self.join("one", item, pieces, **keywords)
        self.step_until_idle()
        return self.outcomes["one"]


def make_prompts(count: int, seed: int = 5) -> list[str]:
    """Prompts of many lengths; some begin alike."""
    choose = random.Random(seed)
    words = " ".join(CORPUS).split()
    return [
        " ".join(
            [*CORPUS[:1] * choose.randint(0, 1), *choose.choices(words, k=choose.randint(1, 9))]
        )
        for _ in range(count)
    ]
