"""Sparse embeddings: a weight for each token of the vocabulary that a text is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from batchery.errors import ModelLoadError
from batchery_worker.models.inputs import SparseEmbeddingKeywords
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.source import ModelSource, check_weights
from batchery_worker.models.text_model import Outputs


class SparseEmbeddingModel(SentenceModel):
    """Turns texts into sparse vectors, with SPLADE and its like.

    An item is a text, or a list of token ids. Keywords of a job: see `SparseEmbeddingKeywords`. A
    result has the shape of `batchery.SparseEmbedding`.
    """

    auto_class = AutoModelForMaskedLM

    library_class = "SparseEncoder"

    keywords = SparseEmbeddingKeywords

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_weights(source, missing, "masked language model", "sparse embeddings")
        made_up = any(type(each).__name__ == "SparseAutoEncoder" for each in self._tail)
        if made_up and not self._lists(source, "SparseAutoEncoder"):
            raise ModelLoadError(
                f"model {source.name!r}: its checkpoint has no trained masked language model"
            )
        self.reading = self._read_output
        self._takes_maximum = [
            (type(each).__name__, getattr(each, "pooling_strategy", "")) for each in self._tail
        ] == [("SpladePooling", "max")]

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        shape = outputs.pending.wait().shape[1:]
        if len(shape) != 1:
            raise ModelLoadError(
                f"model {source.name!r}: gives {tuple(shape)} numbers; it is no sparse model"
            )

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

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """Weights, (B, C), for C tokens of the vocabulary."""
        weights: Tensor = features["sentence_embedding"].float()
        return weights

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
