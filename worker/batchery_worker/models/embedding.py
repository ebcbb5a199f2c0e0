"""Embeddings: one vector per text."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModel

from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.models.inputs import EmbeddingKeywords
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.source import ModelSource, check_weights
from batchery_worker.models.text_model import Outputs


class EmbeddingModel(SentenceModel):
    """Turns texts into vectors.

    An item is a text, or a list of token ids. Keywords of a job: `prompt` (the name of a prompt),
    `normalize`, `dimensions` and `encoding` (`float` or `base64`); see `EmbeddingKeywords`. A
    result has the shape of `batchery.Embedding`.
    """

    auto_class = AutoModel

    library_class = "SentenceTransformer"

    keywords = EmbeddingKeywords

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_weights(source, missing)
        self.reading = self._read_output
        setting = self.settings.pooling
        if setting == "auto":
            return
        for module in self._tail:
            if type(module).__name__ == "Pooling":
                module.pooling_mode = "lasttoken" if setting == "last" else setting
                return
        raise ModelLoadError(
            f"model {source.name!r}: pooling = {setting!r}, but it pools no token vectors"
        )

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        self.dimensions = outputs.pending.wait().shape[1]
        if (self.settings.dimensions or 1) > self.dimensions:
            raise ModelLoadError(
                f"model {source.name!r}: dimensions = {self.settings.dimensions}, but its vectors"
                f" have {self.dimensions}"
            )

    def _read_keywords(self, keywords: Mapping[str, Any]) -> EmbeddingKeywords:
        options: EmbeddingKeywords = super()._read_keywords(keywords)
        if options.dimensions is not None and options.dimensions > self.dimensions:
            raise InvalidItem(
                f"keyword dimensions = {options.dimensions}: the model's vectors have"
                f" {self.dimensions}"
            )
        return options

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """Vectors, (B, D)."""
        vectors: Tensor = features["sentence_embedding"].float()
        return vectors

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (B, D)."""
        limit = options.dimensions or self.settings.dimensions or self.library.truncate_dim
        if limit is not None:
            values = values[:, :limit]
        return self._scaled(values, options)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> Sequence[Any]:
        rows = values.numpy()
        if self._read_keywords(keywords).encoding == "base64":
            little = rows.astype("<f4", copy=False)
            return self._give(outputs, vector=[b64encode(row).decode("ascii") for row in little])
        return self._give(outputs, vector=rows)
