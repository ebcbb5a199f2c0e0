"""The models that are measured: one with weights, and a tiny one with random ones, made here.

The tiny one writes nonsense at a thousand tokens a second, so that what is around it is measured.
Nothing is downloaded for it, and torch is not imported.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.chat_model import chat_model_folder

#: Names for `--model`.
MODELS = ("smollm2", "tiny")

#: Sizes of the tiny Llama, and longest text, in tokens.
VOCABULARY, POSITIONS = 2_048, 2_048
LAYERS, HIDDEN, HEADS, INTERMEDIATE = 2, 64, 4, 128

#: Deviation of its weights: large enough that its greedy texts do not run in circles at once.
SPREAD = 0.4

#: Ends a text, which no model of a benchmark does by itself: its jobs say how long theirs are.
END = "<|end|>"


def generation_folder(name: str, folder: Path) -> Path:
    """The files of a model.

    Args:
        name: One of `MODELS`, or a folder of another.
        folder: Where the tiny one is made.
    """
    if name == "smollm2":
        return chat_model_folder()
    if name != "tiny":
        return Path(name)
    target = folder / name
    target.mkdir()
    _save_tokenizer(target)
    (target / "config.json").write_text(json.dumps(_config()))
    save_file(dict(_weights()), target / "model.safetensors", metadata={"format": "pt"})
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


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights by their names in transformers."""
    random = np.random.default_rng(1)

    def table(name: str, *sizes: int) -> tuple[str, NDArray[np.float32]]:
        drawn = random.standard_normal(sizes, dtype=np.float32) * np.float32(SPREAD)
        return f"{name}.weight", drawn

    def norm(name: str) -> tuple[str, NDArray[np.float32]]:
        return f"{name}.weight", np.ones(HIDDEN, dtype=np.float32)

    yield table("model.embed_tokens", VOCABULARY, HIDDEN)
    yield table("lm_head", VOCABULARY, HIDDEN)
    yield norm("model.norm")
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        yield norm(f"{layer}.input_layernorm")
        yield norm(f"{layer}.post_attention_layernorm")
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield table(f"{layer}.self_attn.{name}", HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            yield table(f"{layer}.mlp.{name}", INTERMEDIATE, HIDDEN)
        yield table(f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE)
