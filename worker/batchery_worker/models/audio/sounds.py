"""Batch models of sound: what labels recordings, and what gives vectors of them."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from transformers import AutoModel, AutoModelForAudioClassification

from batchery_worker.models.audio.recordings import AudioReader, fills_up, make_tone
from batchery_worker.models.media_kinds import LabelModel, VectorModel
from batchery_worker.models.media_model import MediaModel, Prepared, TextReader

#: Samples for each token of a sound that goes through a model as a waveform: models such as
#: wav2vec2 make a frame of so many.
FRAME_SAMPLES = 320


class SoundReader(AudioReader):
    """Reads recordings by the feature extractor of the model's files."""

    def read(self, data: bytes | str) -> Prepared:
        """Reads one recording; see `Reader.read`."""
        samples, rate = self.decode(data), self.processor.sampling_rate
        # CLAP hears ten seconds, and its extractor draws which: the same ones each time.
        np.random.seed(0)
        inputs = self.processor(samples, sampling_rate=rate, return_tensors="np")
        return Prepared({name: np.asarray(each)[0] for name, each in inputs.items()})


class SoundTextReader(TextReader, SoundReader):
    """Reads texts, too."""

    fields: ClassVar[tuple[str, ...]] = ("audio", "text")


class SoundModel(MediaModel):
    """A transformers model of sound; subclasses say what becomes of its output.

    Sounds of several lengths share a pass only if the model was trained with an attention mask:
    filled up without one, they would have other results than alone.
    """

    Reader = SoundReader

    _tower = "get_audio_features"

    def sample(self) -> bytes:
        """A second of a tone."""
        return make_tone(self.reader.processor.sampling_rate)

    def _finish_load(self) -> None:
        super()._finish_load()
        self._fills_up = fills_up(self.reader.processor, self.model.config)

    def _count(self, prepared: Prepared) -> int:
        """Its frames."""
        shape = prepared.inputs[self.reader.processor.model_input_names[0]].shape
        return max(1, int(shape[0] / FRAME_SAMPLES if len(shape) == 1 else max(shape)))

    def _shape(self, prepared: Prepared) -> Any:
        return prepared.is_text if self._fills_up else super()._shape(prepared)

    def _stack(self, items: Sequence[Prepared]) -> dict[str, Tensor]:
        if not self._fills_up:
            return super()._stack(items)
        each = [dict(item.inputs) for item in items]
        return self._send(self.reader.processor.pad(each, padding=True, return_tensors="np"))


class AudioClassificationModel(LabelModel, SoundModel):
    """Labels recordings, with any audio classification model of transformers.

    An item is a recording, which goes through the model whole. Keywords of a job: see
    `ClassificationKeywords`. For scores see `Labels`.
    """

    auto_class = AutoModelForAudioClassification


class AudioEmbeddingModel(VectorModel, SoundModel):
    """Turns recordings, and texts, into vectors of one space, with CLAP.

    An item is a recording, or `{"text": ...}`. Of one that is longer than the model hears, it hears
    parts, equal ones each time. Keywords of a job: see `EmbeddingKeywords`. A result has the shape
    of `batchery.Embedding`.
    """

    Reader = SoundTextReader

    auto_class: ClassVar[Any] = AutoModel

    def _choose_class(self, config: Any) -> Any:
        if not hasattr(config, "audio_config") or not hasattr(config, "text_config"):
            raise ValueError(f"a {config.model_type} model has no sound and texts in one space")
        return super()._choose_class(config)
