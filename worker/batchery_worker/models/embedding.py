"""Embeddings: one vector per text."""

import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import orjson
from numpy.typing import NDArray
from torch import Tensor
from torch.linalg import vector_norm
from transformers import AutoModel

from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.ipc.values import Encoded
from batchery_worker.models.inputs import EmbeddingKeywords
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.source import ModelSource, check_encoder
from batchery_worker.models.text_model import Outputs

logger = logging.getLogger(__name__)

#: A vector is never divided by less.
LEAST_NORM = 1e-12

#: orjson reads float32 as they are, and writes the fewest digits that are read back as the same.
NUMPY = orjson.OPT_SERIALIZE_NUMPY


def number_lists(rows: Iterable[NDArray[np.float32]]) -> list[list[float]]:
    """Rows of numbers as Python's numbers, with the fewest digits.

    Cast to float32, each number is exactly the given one. Written out, it is half as long as the
    float64 that the float32 is.
    """
    return [orjson.loads(orjson.dumps(row, option=NUMPY)) for row in rows]


def of_length_1(vectors: Tensor) -> Tensor:
    """Scales each row of (..., D) to length 1."""
    # As torch's `normalize`, which takes the host twice as long.
    norms: Tensor = vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norms.clamp_min(LEAST_NORM)


def encoded_results(
    heads: Sequence[dict[str, Any]], vectors: Iterable[NDArray[np.float32] | str]
) -> list[Encoded]:
    """Results as JSON, straight from the numbers: no list of floats is ever made."""
    return [
        Encoded(orjson.dumps({**head, "vector": vector}, option=NUMPY))
        for head, vector in zip(heads, vectors, strict=True)
    ]


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
        check_encoder(source, missing)
        self.reading = self._read_output
        poolings = [each for each in self._tail if type(each).__name__ == "Pooling"]
        setting = self.settings.pooling
        if setting != "auto":
            if not poolings:
                raise ModelLoadError(
                    f"model {source.name!r}: pooling = {setting!r}, but it pools no token vectors"
                )
            poolings[0].pooling_mode = "lasttoken" if setting == "last" else setting
        where = "its files or architecture" if setting == "auto" else "its settings"
        modes = [each.pooling_mode for each in poolings]
        logger.info("model %s: pooling is %s, from %s", source.name, *modes or ["none"], where)

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

    def _expect(self, item: Any, **how: Any) -> Any:
        keep = self.settings.dimensions or self.library.truncate_dim
        return self.library.encode(
            item, normalize_embeddings=True, truncate_dim=keep, show_progress_bar=False, **how
        )

    def _numbers(self, result: Any) -> Any:
        return result["vector"]

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (B, D)."""
        limit = options.dimensions or self.settings.dimensions or self.library.truncate_dim
        if limit is not None:
            values = values[:, :limit]
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return of_length_1(values) if scale else values

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]] | list[Encoded]:
        heads, rows = outputs.heads, values.numpy()
        vectors: Iterable[Any] = rows
        if self._read_keywords(keywords).encoding == "base64":
            little = rows.astype("<f4", copy=False)
            vectors = [base64.b64encode(row).decode("ascii") for row in little]
        elif not self._gives_json:
            vectors = number_lists(rows)
        if self._gives_json:
            return encoded_results(heads, vectors)
        return [{**head, "vector": vector} for head, vector in zip(heads, vectors, strict=True)]
