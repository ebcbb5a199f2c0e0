"""Multi-vector embeddings: one vector per token, for late interaction."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import orjson
import torch
from torch import Tensor
from transformers import AutoModel

from batchery.errors import ModelLoadError
from batchery_worker.ipc.values import Encoded
from batchery_worker.models.embedding import NUMPY, number_lists, of_length_1
from batchery_worker.models.forward import Forward
from batchery_worker.models.inputs import MultiVectorKeywords
from batchery_worker.models.sentence_model import LibraryText, SentenceModel
from batchery_worker.models.source import ModelSource, check_encoder
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
        if not self._has_projection(source):
            # Then the library has made one up, with random weights.
            for place in reversed(range(len(self.library))):
                if type(self.library[place]).__name__ == "Dense":
                    del self.library[place]
        super()._take_modules(source)

    @staticmethod
    def _has_projection(source: ModelSource) -> bool:
        listed = [module["type"] for module in source.json("modules.json") or ()]
        config = source.json("config.json") or {}
        return any(each.endswith("Dense") for each in listed) or (
            not listed and "HF_ColBERT" in (config.get("architectures") or ())
        )

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_encoder(source, missing)

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        values = outputs.pending.wait()
        if values.dim() not in (2, 3):
            raise ModelLoadError(f"model {source.name!r}: gives no vector per token")

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (T, D), or (B, L, D) of sentence-transformers' own code."""
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return of_length_1(values) if scale else values

    def _values(self, forward: Forward, batch: Sequence[Any]) -> Tensor:
        rows = super()._values(forward, batch)
        if batch and isinstance(batch[0], LibraryText):
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

    def _expect(self, item: Any, **how: Any) -> Any:
        return self.library.encode(item, normalize_embeddings=True, show_progress_bar=False, **how)

    def _numbers(self, result: Any) -> Any:
        return result["vectors"]

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

    def _are_finite(self, values: Tensor, outputs: Outputs) -> Sequence[bool]:
        if values.dim() == 2:
            return super()._are_finite(values, outputs)
        finite: list[bool] = values.isfinite().flatten(1).all(dim=1).tolist()
        return finite

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]] | list[Encoded]:
        options = self._read_keywords(keywords)
        texts = self._by_item(values, outputs, self._task(self._prompt_name(options)))
        if options.encoding == "base64":
            packed = [base64.b64encode(vectors.astype("<f4").tobytes()) for vectors in texts]
            return [
                {**head, "vectors": text.decode("ascii"), "dimensions": values.shape[-1]}
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
