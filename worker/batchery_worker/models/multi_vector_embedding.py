"""Multi-vector embeddings: one vector per token, for late interaction."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModel

from batchery.errors import ModelLoadError
from batchery_worker.models.forward import Forward
from batchery_worker.models.inputs import MultiVectorKeywords
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.source import ModelSource, check_weights
from batchery_worker.models.text_model import Outputs


class MultiVectorEmbeddingModel(SentenceModel):
    """Turns the tokens of a text into vectors, with ColBERT and its like.

    Which tokens have one, and which masks queries are filled up with, is decided by the model's
    files. A model without a projection gives the vectors of its last layer.

    An item is a text, or a list of token ids. Keywords of a job: see `MultiVectorKeywords`. A
    result has the shape of `batchery.MultiVectorEmbedding`.
    """

    auto_class = AutoModel

    library_class = "MultiVectorEncoder"

    per_token = True

    keywords = MultiVectorKeywords

    reading = "token_vectors"

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    def _take_modules(self, source: ModelSource) -> None:
        architectures = (source.json("config.json") or {}).get("architectures") or ()
        if not self._lists(source, "Dense") and "HF_ColBERT" not in architectures:
            # Then the library has made one up, with random weights.
            for place in reversed(range(len(self.library))):
                if type(self.library[place]).__name__ == "Dense":
                    del self.library[place]
        super()._take_modules(source)

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_weights(source, missing)

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        values = outputs.pending.wait()
        if values.dim() not in (2, 3):
            raise ModelLoadError(f"model {source.name!r}: gives no vector per token")

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (T, D), or (B, L, D) of sentence-transformers' own code."""
        return self._scaled(values, options)

    def _values(self, forward: Forward, batch: Sequence[Any]) -> Tensor:
        rows = super()._values(forward, batch)
        if rows.dim() == 3:  # Of sentence-transformers' own code.
            return rows
        # The other modules work on single tokens, so all texts may be one.
        features = {"token_embeddings": rows[None]}
        for module in self._tail:
            if type(module).__name__ != "MultiVectorMask":
                features = module(features)
        projected: Tensor = features["token_embeddings"][0].float()
        return projected

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """Vectors, (B, L, D), zeros where a token has none."""
        vectors: Tensor = features["token_embeddings"].float()
        mask: Tensor = features["attention_mask"]
        return vectors * mask.unsqueeze(-1)

    def _by_item(self, values: Tensor, outputs: Outputs, task: str | None) -> list[Any]:
        """The vectors of each text that count, (N, D)."""
        if values.dim() == 3:
            return [rows[rows.any(dim=1)].numpy() for rows in values]
        lengths = [head["tokens"] for head in outputs.heads]
        texts = self.by_text(values, lengths)
        for module in self._tail:
            if type(module).__name__ == "MultiVectorMask":
                masks = [self._mask(module, prepared, task) for prepared in outputs.batch]
                texts = [rows[mask] for rows, mask in zip(texts, masks, strict=True)]
        return [rows.numpy() for rows in texts]

    @staticmethod
    def _mask(module: Any, prepared: Any, task: str | None) -> Tensor:
        ids = torch.from_numpy(prepared[:1])
        features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        mask: Tensor = module(features, task=task)["attention_mask"][0].bool()
        return mask

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> Sequence[Any]:
        options = self._read_keywords(keywords)
        texts = self._by_item(values, outputs, self._task(self._prompt_name(options)))
        if options.encoding == "base64":
            packed = [b64encode(each.astype("<f4").tobytes()).decode("ascii") for each in texts]
            return self._give(outputs, vectors=packed, dimensions=[values.shape[-1]] * len(packed))
        return self._give(outputs, vectors=texts)
