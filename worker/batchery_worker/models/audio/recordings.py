"""How recordings are read for each kind of audio model, beside the device."""

import io
import wave
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor
from transformers.pipelines.automatic_speech_recognition import chunk_iter

from batchery.errors import InvalidItem
from batchery_worker.models.audio.decoding import Samples, decode_audio
from batchery_worker.models.media_model import ModelReader

#: Length of a window where the model does not say, and the share of it on either side that its
#: neighbours have, too: those of transformers' pipeline.
WINDOW_S, CONTEXT_SHARE = 30, 1 / 6

#: Minimum length of a recording, in seconds: many models cannot hear less.
LEAST_S = 0.1


class Window(NamedTuple):
    """A part of a recording, ready for the model.

    Attributes:
        values: Samples of shape (N,), or frames of shape (bins, N); float32.
        length: How many of the N are sound, and no padding.
        stride: Its samples, and how many of them on the left and on the right are context only.
    """

    values: NDArray[np.float32]
    length: int
    stride: tuple[int, int, int]


class Recording(NamedTuple):
    """A prepared item of transcription.

    Attributes:
        windows: Those that the model has not had. Whoever runs it takes them out one by one: an
            hour of sound is 170 to 350 MB, as windows overlap.
        total: How many there were.
        duration_s: Of the whole recording.
    """

    windows: list[Window]
    total: int
    duration_s: float


class AudioReader(ModelReader):
    """Decodes a recording at the rate of its model."""

    fields: ClassVar[tuple[str, ...]] = ("audio",)

    processor_class: ClassVar[Any] = AutoFeatureExtractor

    def decode(self, data: bytes | str) -> Samples:
        """The samples of a recording. Raises InvalidItem."""
        assert isinstance(data, bytes)
        rate = self.processor.sampling_rate
        samples = decode_audio(data, rate, self.media.max_audio_s)
        if len(samples) < LEAST_S * rate:
            raise InvalidItem(f"audio: has {len(samples) / rate:.3f} seconds, fewer than {LEAST_S}")
        return samples


class RecordingReader(AudioReader):
    """Cuts a recording into windows with overlap, as transformers' pipeline does."""

    def read(self, data: bytes | str) -> Recording:
        """See `Reader.read`."""
        samples, extractor = self.decode(data), self.processor
        rate = extractor.sampling_rate
        # Windows begin where an output of the model does.
        unit = getattr(self.config, "inputs_to_logits_ratio", 1)
        window_s = getattr(extractor, "chunk_length", WINDOW_S)
        length = round(window_s * rate / unit) * unit
        context = round(window_s * CONTEXT_SHARE * rate / unit) * unit
        cut: Any = chunk_iter
        name = extractor.model_input_names[0]
        windows = [
            Window(part[name][0].numpy(), int(part["attention_mask"].sum()), part["stride"])
            for part in cut(samples, extractor, length, context, context)
        ]
        return Recording(windows, len(windows), len(samples) / rate)


def fills_up(extractor: Any, config: Any) -> bool:
    """Whether sounds of several lengths may share a pass, filled up and masked.

    Some models were trained without a mask, which their feature extractor says, and some take means
    over a whole sound, padding included.
    """
    is_raw = extractor.model_input_names[0] == "input_values"
    takes_means = getattr(config, "feat_extract_norm", "layer") == "group"
    return is_raw and bool(extractor.return_attention_mask) and not takes_means


def make_tone(rate: int) -> bytes:
    """A second of a tone, as a file."""
    samples = 8_000 * np.sin(np.arange(rate) * (2 * np.pi * 440 / rate))
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
