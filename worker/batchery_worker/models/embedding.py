"""Embeddings of three kinds: a vector per text, weights of tokens, and a vector per token."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM

from batchery_worker.models.forward import Forward
from batchery_worker.models.inputs import (
    MultiVectorKeywords,
    SparseEmbeddingKeywords,
)
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.text_items import EmbeddingItems, ItemsSetup
from batchery_worker.models.text_model import Outputs
from batchery_worker.plain_values import Vector


class EmbeddingModel(EmbeddingItems, SentenceModel):
    """Turns texts into vectors.

    An item is a text, or a list of token ids. Keywords of a job: `prompt` (the name of a prompt),
    `normalize`, `dimensions` and `encoding` (`float` or `base64`); see `TextEmbeddingKeywords`. A
    result has the shape of `batchery.Embedding`.
    """

    auto_class = AutoModel

    library_class = "SentenceTransformer"

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    _gives_rows = False

    def give_rows(self) -> None:
        """Makes results a `Vector` each from now on."""
        self._gives_rows = True

    def describe(self) -> ItemsSetup:
        """As of `EmbeddingItems`; also refuses prompts for which the library's own code runs."""
        if self._own_code:
            raise ValueError(f"it takes no feeders, {self.why_padded}; set feeders = 0")
        return super().describe()

    def _finish_load(self) -> None:
        self.reading = self._read_output
        setting = self.settings.pooling
        if setting == "auto":
            return
        for module in self._tail:
            if type(module).__name__ == "Pooling":
                module.pooling_mode = "lasttoken" if setting == "last" else setting
                return
        raise ValueError(f"pooling = {setting!r}, but it pools no token vectors")

    def _find_problem(self, values: Tensor) -> str:
        self.dimensions = values.shape[1]
        if (self.settings.dimensions or 1) <= self.dimensions:
            return ""
        return f"dimensions = {self.settings.dimensions}, but its vectors have {self.dimensions}"

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Vectors, (B, D)."""
        limit = options.dimensions or self.settings.dimensions or self.library.truncate_dim
        if limit is not None:
            values = values[:, :limit]
        return self._scaled(values, options)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> Sequence[Any]:
        if self._gives_rows:
            return [Vector(row) for row in values.numpy()]
        encoded = self.write(outputs.heads, values.numpy(), keywords)
        return encoded if self._gives_json else [each.value for each in encoded]


class SparseEmbeddingModel(SentenceModel):
    """Turns texts into sparse vectors, with SPLADE and its like.

    An item is a text, or a list of token ids. Keywords of a job: see `SparseEmbeddingKeywords`. A
    result has the shape of `batchery.SparseEmbedding`.
    """

    auto_class = AutoModelForMaskedLM

    library_class = "SparseEncoder"

    keywords = SparseEmbeddingKeywords

    trained_part = ("masked language model", "sparse embeddings")

    def _finish_load(self) -> None:
        made_up = any(type(each).__name__ == "SparseAutoEncoder" for each in self._tail)
        if made_up and not self._lists("SparseAutoEncoder"):
            raise ValueError("its checkpoint has no trained masked language model")
        self.reading = self._read_output
        self._takes_maximum = [
            (type(each).__name__, getattr(each, "pooling_strategy", "")) for each in self._tail
        ] == [("SpladePooling", "max")]

    def _find_problem(self, values: Tensor) -> str:
        shape = tuple(values.shape[1:])
        return "" if len(shape) == 1 else f"gives {shape} numbers; it is no sparse model"

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Weights, (B, C), for C tokens of the vocabulary."""
        keep = options.top_k or self.library.max_active_dims
        if keep is None or keep >= values.shape[1]:
            return values
        largest, places = values.topk(keep, dim=1, sorted=False)
        return torch.zeros_like(values).scatter_(1, places, largest)

    def _read_output(self, output: Any, features: dict[str, Any]) -> Tensor:
        if not self._takes_maximum:
            return super()._read_output(output, features)
        # The weight grows with the logit, so that of the largest is the largest, and weights need
        # not be computed for all tokens.
        logits = output.logits
        if "lengths" in features:
            texts = torch.split(logits[0], features["lengths"])
            # `segment_reduce` takes a CPU four times as long.
            largest = torch.stack([text.amax(dim=0) for text in texts])
        else:
            mask = features["attention_mask"].unsqueeze(-1)
            largest = logits.masked_fill_(mask == 0, -torch.inf).amax(dim=1)
        one = {"token_embeddings": largest[:, None].float()}
        one["attention_mask"] = torch.ones_like(largest[:, :1])
        return self._read_features(self._tail[0](one))

    def _results(
        self,
        values: Tensor,
        outputs: Outputs,
        keywords: Mapping[str, Any],  # noqa: ARG002 (`_finish` has used them)
    ) -> Sequence[Any]:
        rows = values.numpy()
        indices = [np.flatnonzero(row) for row in rows]
        numbers = [row[places] for row, places in zip(rows, indices, strict=True)]
        return self._give(outputs, indices=indices, values=numbers)


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

    def _take_modules(self) -> None:
        architectures = (self._source.json("config.json") or {}).get("architectures") or ()
        if not self._lists("Dense") and "HF_ColBERT" not in architectures:
            # Then the library has made one up, with random weights.
            for place in reversed(range(len(self.library))):
                if type(self.library[place]).__name__ == "Dense":
                    del self.library[place]
        super()._take_modules()

    def _find_problem(self, values: Tensor) -> str:
        return "" if values.dim() in (2, 3) else "gives no vector per token"

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
