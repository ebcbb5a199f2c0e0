"""The models that are measured: one with weights, and Llamas with random ones, made here.

The tiny one writes nonsense at a thousand tokens a second, so that what is around it is measured.
The other one has the shape of Llama 3.2 1B, for a GPU. Nothing is downloaded for them, and torch is
not imported.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.chat_model import chat_model_folder


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama by its sizes.

    Attributes:
        spread: Deviation of its weights: large enough that its greedy texts do not run in circles
            at once, and small enough that its numbers stay finite in half precision.
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    spread: float


#: Words of the tokenizer that is made for them, and longest text, in tokens.
VOCABULARY, POSITIONS = 2_048, 2_048

#: Llamas with random weights.
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "tiny": Shape(2, 64, 4, 4, 128, VOCABULARY, 0.4),
        "llama-1b": Shape(16, 2048, 32, 8, 8192, 128_256, 0.05),
    }
)

#: Names for `--model`.
MODELS = ("smollm2", *SHAPES)

#: So many random numbers are drawn, and used again and again: a billion take half a minute.
DRAWN = 1 << 22

#: Ends a text, which no model of a benchmark does by itself: its jobs say how long theirs are.
END = "<|end|>"


def generation_folder(name: str, folder: Path) -> Path:
    """The files of a model.

    Args:
        name: One of `MODELS`, or a folder of another.
        folder: Where one with random weights is made.
    """
    if name == "smollm2":
        return chat_model_folder()
    if name not in SHAPES:
        return Path(name)
    target, shape = folder / name, SHAPES[name]
    target.mkdir()
    _save_tokenizer(target)
    (target / "config.json").write_text(json.dumps(_config(shape)))
    save_file(dict(_weights(shape)), target / "model.safetensors", metadata={"format": "pt"})
    return target


def _save_tokenizer(target: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    chat = "{% for each in messages %}{{ each['content'] }}\n{% endfor %}"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "intermediate_size": shape.intermediate,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _weights(shape: Shape) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Weights by their names in transformers."""
    random = np.random.default_rng(1)
    drawn = (random.standard_normal(DRAWN, dtype=np.float32) * shape.spread).astype(np.float16)

    def table(name: str, *sizes: int) -> tuple[str, NDArray[np.float16]]:
        start = int(random.integers(DRAWN))
        return f"{name}.weight", np.resize(np.roll(drawn, start), sizes)

    def norm(name: str) -> tuple[str, NDArray[np.float16]]:
        return f"{name}.weight", np.ones(width, dtype=np.float16)

    width, inner = shape.hidden, shape.intermediate
    keys = width // shape.heads * shape.key_heads
    yield table("model.embed_tokens", shape.vocabulary, width)
    yield table("lm_head", shape.vocabulary, width)
    yield norm("model.norm")
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield norm(f"{layer}.input_layernorm")
        yield norm(f"{layer}.post_attention_layernorm")
        for name, size in (("q_proj", width), ("k_proj", keys), ("v_proj", keys)):
            yield table(f"{layer}.self_attn.{name}", size, width)
        yield table(f"{layer}.self_attn.o_proj", width, width)
        for name in ("gate_proj", "up_proj"):
            yield table(f"{layer}.mlp.{name}", inner, width)
        yield table(f"{layer}.mlp.down_proj", width, inner)
