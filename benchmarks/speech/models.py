"""The models that are measured: a Whisper with random weights, or any folder."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers

#: The name of the random one.
SMALL = "small"

#: How much likelier than other tokens the end is. So windows have texts of very different lengths,
#: about as long as those of speech.
END_BIAS = 2.8

SPECIALS = (
    *("endoftext", "startoftranscript", "translate", "transcribe", "startoflm", "startofprev"),
    *("nocaptions", "notimestamps"),
)


def speech_folder(name: str, folder: Path) -> Path:
    """The files of a model.

    Args:
        name: `small`, or a folder of another one.
        folder: Where one with random weights is made.
    """
    if name != SMALL:
        return Path(name)
    target = folder / name
    _save(target)
    return target


def _save(target: Path) -> None:
    of: Any = transformers
    specials = [f"<|{name}|>" for name in SPECIALS]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), specials[0]]
    tokenizer = of.WhisperTokenizer(vocab={each: at for at, each in enumerate(letters)}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": specials[1:]})
    tokenizer.pad_token = specials[0]
    token = tokenizer.convert_tokens_to_ids
    end, start = token("<|endoftext|>"), token("<|startoftranscript|>")
    ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    side = {"layers": 4, "attention_heads": 4, "ffn_dim": 512}
    sides = {f"{each}_{key}": size for each in ("encoder", "decoder") for key, size in side.items()}
    config = of.WhisperConfig(
        vocab_size=len(tokenizer) + 1501,
        d_model=128,
        decoder_start_token_id=start,
        init_std=0.2,
        **sides,
        **ends,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = of.WhisperForConditionalGeneration(config)
        ending = model.model.decoder.embed_tokens.weight[end]
        # It is that of the padding, too, which transformers leaves at 0.
        ending.normal_(std=0.2)
        model.model.decoder.layer_norm.bias += END_BIAS * ending / ending.norm()
    model.generation_config = of.GenerationConfig(
        is_multilingual=False,
        decoder_start_token_id=start,
        no_timestamps_token_id=token("<|notimestamps|>"),
        prev_sot_token_id=token("<|startofprev|>"),
        max_initial_timestamp_index=50,
        max_length=224,
        return_timestamps=False,
        **ends,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    of.WhisperFeatureExtractor().save_pretrained(target)
