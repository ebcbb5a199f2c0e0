"""Batch models of sound: what labels recordings, and what gives vectors of them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, AutoModelForAudioClassification

from batchery_worker.models.audio.recordings import AudioReader, fills_up, make_tone
from batchery_worker.models.inputs import check_text
from batchery_worker.models.media_kinds import LabelModel, VectorModel
from batchery_worker.models.media_model import MediaModel, TokenizedText, tokenize
from batchery_worker.models.source import ModelSource, load_tokenizer

#: Samples for each token of a sound that goes through a model as a waveform: models such as
#: wav2vec2 make a frame of so many.
FRAME_SAMPLES = 320


class Sound(NamedTuple):
    """A recording as it goes through a model.

    Attributes:
        inputs: Of the model, without their batch dimension.
    """

    inputs: Mapping[str, NDArray[Any]]


class SoundReader(AudioReader):
    """Reads recordings by the feature extractor of the model's files."""

    def read(self, data: bytes | str, keywords: Mapping[str, Any]) -> Any:  # noqa: ARG002
        """Reads one recording; see `Reader.read`."""
        assert isinstance(data, bytes)
        samples, rate = self.decode(data), self.extractor.sampling_rate
        # CLAP hears ten seconds, and its extractor draws which: the same ones each time.
        np.random.seed(0)
        inputs = self.extractor(samples, sampling_rate=rate, return_tensors="np")
        return Sound({name: np.asarray(each)[0] for name, each in inputs.items()})


class SoundTextReader(SoundReader):
    """Reads texts, too, for models that have them in the same space."""

    fields: ClassVar[tuple[str, ...]] = ("audio", "text")

    def open(self) -> None:
        """Loads the extractor and the tokenizer; see `Reader.open`."""
        super().open()
        self.tokenizer = load_tokenizer(ModelSource(self.settings))
        limit = self.tokenizer.model_max_length
        limit = min(self.settings.max_length or limit, limit)
        self._options = {"truncation": True, "max_length": limit}

    def read(self, data: bytes | str, keywords: Mapping[str, Any]) -> Any:
        """Reads one recording or text; see `Reader.read`."""
        if isinstance(data, bytes):
            return super().read(data, keywords)
        text = check_text("text", data, self.settings.max_chars)
        return tokenize(self.tokenizer, text, self.settings, self._options)


class SoundModel(MediaModel):
    """A transformers model of sound; subclasses say what becomes of its output.

    Sounds of several lengths share a pass only if the model was trained with an attention mask:
    filled up without one, they would have other results than alone.
    """

    Reader = SoundReader

    reader: SoundReader

    def sample(self) -> bytes:
        """A second of a tone."""
        return make_tone(self.reader.extractor.sampling_rate)

    def tokens(self, prepared: Any) -> int:
        """The frames of a sound, or the tokens of a text."""
        if isinstance(prepared, TokenizedText):
            return len(prepared.inputs["input_ids"])
        shape = prepared.inputs[self.reader.extractor.model_input_names[0]].shape
        return max(1, int(shape[0] / FRAME_SAMPLES if len(shape) == 1 else max(shape)))

    def _shape(self, prepared: Any) -> Any:
        is_sound = isinstance(prepared, Sound)
        has_mask = is_sound and fills_up(self.reader.extractor, self.model.config)
        return "filled up" if has_mask else super()._shape(prepared)

    def _stack(self, items: Sequence[Sound]) -> dict[str, Tensor]:
        each: Any = [dict(item.inputs) for item in items]
        return self._send(self.reader.extractor.pad(each, padding=True, return_tensors="np"))


class AudioClassificationModel(LabelModel, SoundModel):
    """Labels recordings, with any audio classification model of transformers.

    An item is a recording, which goes through the model whole. Keywords of a job: see
    `ImageClassificationKeywords`. For scores see `Labels`.
    """

    auto_class = AutoModelForAudioClassification


class AudioEmbeddingModel(VectorModel, SoundModel):
    """Turns recordings, and texts, into vectors of one space, with CLAP.

    An item is a recording, or `{"text": ...}`. Of one that is longer than the model hears, it hears
    parts, equal ones each time. Keywords of a job: see `ImageEmbeddingKeywords`. A result has the
    shape of `batchery.Embedding`.
    """

    Reader = SoundTextReader

    reader: SoundTextReader

    auto_class: ClassVar[Any] = AutoModel

    def _check_config(self, config: Any) -> None:
        super()._check_config(config)
        if not hasattr(config, "audio_config") or not hasattr(config, "text_config"):
            raise ValueError(f"a {config.model_type} model has no sound and texts in one space")

    def _embed(self, items: Sequence[Any]) -> Tensor:
        if isinstance(items[0], TokenizedText):
            return self._embed_texts(items)
        vectors: Tensor = self.model.get_audio_features(**self._stack(items)).pooler_output
        return vectors
