"""Recordings of all kinds, and tiny models of sound with random weights."""

import io
import json
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from support.tiny_models import make_tokenizer

#: Saves a tiny model of sound: `build_sound("whisper")`.

RATE = 16_000

#: Length of a window of the tiny Whisper, in seconds; real ones have 30.
WINDOW_S = 3

LANGUAGES = ("en", "de", "fr")

LABELS = {0: "bell", 1: "horn", 2: "rain"}
NAMED = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WAV2VEC2 = {
    **SMALL,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 8, 4),
    "conv_stride": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "initializer_range": 0.3,
}


def make_tones(seconds: float, seed: int = 0) -> NDArray[np.float32]:
    """A melody of random tones, in samples."""
    generator = np.random.default_rng(seed)
    times = np.arange(round(seconds * RATE)) / RATE
    notes = generator.uniform(150, 3000, size=(3, int(seconds * 8) + 1))
    pitch = notes[:, (times * 8).astype(int)]
    waves = np.sin(2 * np.pi * np.cumsum(pitch, axis=1) / RATE)
    return np.asarray(0.2 * waves.sum(axis=0), np.float32)


def write_sound(
    samples: NDArray[Any], codec: str = "pcm_s16le", container: str = "wav", layout: str = "mono"
) -> bytes:
    """A file with these samples in each channel."""
    file = io.BytesIO()
    channels = av.AudioLayout(layout).nb_channels
    packed = np.repeat((samples * 32_767).astype(np.int16), channels)[None]
    with av.open(file, "w", format=container) as written:
        stream: Any = written.add_stream(codec, rate=RATE, layout=layout)
        frame = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        frame.sample_rate = RATE
        resampler = av.AudioResampler(stream.format.name, layout, RATE)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            written.mux(stream.encode(part))
        written.mux(stream.encode(None))
    return file.getvalue()


def make_recording(seconds: float, seed: int = 0) -> bytes:
    """A melody, as a file."""
    return write_sound(make_tones(seconds, seed))


def write_header(data: bytes, *, rate: int = RATE, channels: int = 1, codec: int = 1) -> bytes:
    """A WAV file of 16 bits whose header says whatever it is told, and that it never ends."""
    wide = 2 * channels
    head = struct.pack("<IHHIIHH", 16, codec, channels, rate, rate * wide % 2**32, wide, 16)
    endless = struct.pack("<I", 0xFFFF_FFF0)
    return b"RIFF" + endless + b"WAVEfmt " + head + b"data" + endless + data


def save_sound_model(folder: Path, architecture: str) -> None:
    """Writes a model with its feature extractor, and its tokenizer if it has one.

    Args:
        folder: Where to.
        architecture: `whisper`, `whisper-en`; `wav2vec2`, with an attention mask, and
            `wav2vec2-unmasked`; `labels`, `labels-unmasked` and `spectrogram-labels`; `clap`.
    """
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(11)
        if architecture.startswith("whisper"):
            _save_whisper(folder, is_multilingual=architecture == "whisper")
        elif architecture.startswith("wav2vec2"):
            _save_ctc(folder, is_masked=architecture == "wav2vec2")
        else:
            _save_listener(folder, architecture)


def _save_whisper(folder: Path, *, is_multilingual: bool) -> None:
    of: Any = transformers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    languages = LANGUAGES if is_multilingual else ()
    names = ["endoftext", "startoftranscript", *languages, "translate", "transcribe"]
    names += ["startoflm", "startofprev", "nocaptions", "notimestamps"]
    specials = [f"<|{name}|>" for name in names]
    vocabulary = {token: number for number, token in enumerate([*letters, specials[0]])}
    tokenizer = of.WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": specials[1:]})
    token = tokenizer.convert_tokens_to_ids
    end, start = token("<|endoftext|>"), token("<|startoftranscript|>")
    ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    layers = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
    sides = {
        f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in layers.items()
    }
    config = of.WhisperConfig(
        vocab_size=len(tokenizer) + WINDOW_S * 50 + 1,
        d_model=32,
        num_mel_bins=20,
        max_source_positions=WINDOW_S * 50,
        max_target_positions=48,
        init_std=0.4,
        decoder_start_token_id=start,
        **sides,
        **ends,
    )
    model = of.WhisperForConditionalGeneration(config)
    known: dict[str, Any] = {"is_multilingual": is_multilingual}
    if is_multilingual:
        known["lang_to_id"] = {f"<|{each}|>": token(f"<|{each}|>") for each in languages}
        known["task_to_id"] = {name: token(f"<|{name}|>") for name in ("translate", "transcribe")}
    model.generation_config = of.GenerationConfig(
        decoder_start_token_id=start,
        no_timestamps_token_id=token("<|notimestamps|>"),
        prev_sot_token_id=token("<|startofprev|>"),
        alignment_heads=[[0, 0], [0, 1]],
        suppress_tokens=[],
        begin_suppress_tokens=[end],
        max_initial_timestamp_index=50,
        max_length=20,
        return_timestamps=False,
        **known,
        **ends,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = of.WhisperFeatureExtractor(feature_size=20, chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)


def _save_ctc(folder: Path, *, is_masked: bool) -> None:
    of: Any = transformers
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJ"]
    folder.mkdir(exist_ok=True)
    numbers = {letter: number for number, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    of.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    norm = "layer" if is_masked else "group"
    stable = {"do_stable_layer_norm": is_masked, "feat_extract_norm": norm}
    config = of.Wav2Vec2Config(vocab_size=len(letters), pad_token_id=0, **WAV2VEC2, **stable)
    of.Wav2Vec2ForCTC(config).save_pretrained(folder)
    of.Wav2Vec2FeatureExtractor(return_attention_mask=is_masked).save_pretrained(folder)


def _save_listener(folder: Path, architecture: str) -> None:
    of: Any = transformers
    if architecture == "clap":
        text = {**SMALL, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 66}
        text |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 3}
        audio = {"spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": (4, 4)}
        audio |= {"depths": (1, 1), "num_attention_heads": (2, 2), "patch_embeds_hidden_size": 16}
        audio |= {"window_size": 4, "hidden_size": 32, "enable_fusion": False}
        audio |= {"patch_embed_input_channels": 1, "num_classes": 4}
        config = of.ClapConfig(text_config=text, audio_config=audio, projection_dim=24)
        model = of.ClapModel(config)
        extractor = of.ClapFeatureExtractor(
            feature_size=16,
            max_length_s=2,
            sampling_rate=RATE,
            frequency_max=8_000,
            truncation="rand_trunc",
        )
        tokenizer = make_tokenizer()
        tokenizer.model_max_length = 60
        tokenizer.save_pretrained(folder)
    elif architecture == "spectrogram-labels":
        config = of.ASTConfig(
            **SMALL, **NAMED, intermediate_size=48, max_length=128, num_mel_bins=32
        )
        model = of.ASTForAudioClassification(config)
        extractor = of.ASTFeatureExtractor(max_length=128, num_mel_bins=32)
    else:
        is_masked = architecture == "labels"
        norm = "layer" if is_masked else "group"
        stable = {"do_stable_layer_norm": is_masked, "feat_extract_norm": norm}
        config = of.Wav2Vec2Config(**WAV2VEC2, **stable, **NAMED, classifier_proj_size=16)
        model = of.Wav2Vec2ForSequenceClassification(config)
        extractor = of.Wav2Vec2FeatureExtractor(return_attention_mask=is_masked)
    model.save_pretrained(folder)
    extractor.save_pretrained(folder)
