"""Multi-vector embeddings: one vector per token, for late interaction."""

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
from torch import Tensor
from transformers import AutoModel

from batchery.errors import ModelLoadError
from batchery_worker.ipc.values import Encoded
from batchery_worker.models.embedding import NUMPY, number_lists, of_length_1
from batchery_worker.models.forward import Forward
from batchery_worker.models.inputs import MultiVectorKeywords
from batchery_worker.models.saved_modules import read_lengths, read_projection, read_prompts
from batchery_worker.models.source import ModelSource
from batchery_worker.models.text_model import Outputs, PromptedModel
from batchery_worker.models.tokenizer import Cut, Prepared

logger = logging.getLogger(__name__)


class MultiVectorEmbeddingModel(PromptedModel):
    """Turns each token of a text into a vector, with ColBERT and its like.

    The vectors are those of the model's last layer, behind the projection that its files have. All
    tokens have one, special ones included: which of them count is decided by who compares them.
    Queries are not filled up with masks.

    An item is a text, or a list of token ids. Keywords of a job: see `MultiVectorKeywords`. A
    result has the shape of `batchery.MultiVectorEmbedding`.
    """

    auto_class = AutoModel

    per_token = True

    keywords = MultiVectorKeywords

    reading = "token_vectors"

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        self._keep_encoder(source, missing)
        self._take_prompts(source, *read_prompts(source))
        self._lengths = read_lengths(source)
        self._projection = read_projection(source, self.model.config.hidden_size)
        self._projection.to(self._device).eval()
        logger.info("model %s: %d layers of projection", source.name, len(self._projection))

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        values = outputs.pending.wait()
        if values.dim() != 2:
            raise ModelLoadError(f"model {source.name!r}: gives no vector per token")

    def _cut(self, options: Any) -> Cut:
        name = options.prompt or self.default_prompt
        return super()._cut(options)._replace(max_length=self._lengths.get(name or ""))

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (T, D)."""
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return of_length_1(values) if scale else values

    def _values(self, forward: Forward, batch: Sequence[Prepared]) -> Tensor:
        projected: Tensor = self._projection(super()._values(forward, batch))
        return projected

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]] | list[Encoded]:
        lengths = [head["tokens"] for head in outputs.heads]
        texts = [vectors.numpy() for vectors in self.by_text(values, lengths)]
        if self._read_keywords(keywords).encoding == "base64":
            packed = [base64.b64encode(vectors.astype("<f4").tobytes()) for vectors in texts]
            return [
                {**head, "vectors": text.decode("ascii"), "dimensions": values.shape[1]}
                for head, text in zip(outputs.heads, packed, strict=True)
            ]
        if self._gives_json:
            return [
                Encoded(orjson.dumps({**head, "vectors": vectors}, option=NUMPY))
                for head, vectors in zip(outputs.heads, texts, strict=True)
            ]
        return [
            {**head, "vectors": number_lists(vectors)}
            for head, vectors in zip(outputs.heads, texts, strict=True)
        ]
