"""Sparse embeddings: a weight for each token of the vocabulary that a text is about."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from batchery.errors import ModelLoadError
from batchery_worker.ipc.values import Encoded
from batchery_worker.models.embedding import NUMPY, number_lists
from batchery_worker.models.forward import Forward
from batchery_worker.models.inputs import SparseEmbeddingKeywords
from batchery_worker.models.saved_modules import check_splade, read_prompts
from batchery_worker.models.source import ModelSource, check_head
from batchery_worker.models.text_model import Outputs, PromptedModel
from batchery_worker.models.tokenizer import Prepared


class SparseEmbeddingModel(PromptedModel):
    """Turns texts into sparse vectors, with SPLADE and its like: masked language models.

    The weight of a token of the vocabulary is log(1 + x), for the largest x above 0 that the model
    gives it at any token of the text. The text's special tokens count, as in SPLADE.

    An item is a text, or a list of token ids. Keywords of a job: see `SparseEmbeddingKeywords`. A
    result has the shape of `batchery.SparseEmbedding`.
    """

    auto_class = AutoModelForMaskedLM

    keywords = SparseEmbeddingKeywords

    reading = "max_logits"

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_head(source, missing, "masked language model", "sparse embeddings")
        check_splade(source)
        self._take_prompts(source, *read_prompts(source))

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        shape = outputs.pending.wait().shape[1:]
        if len(shape) != 1:
            raise ModelLoadError(
                f"model {source.name!r}: gives {tuple(shape)} numbers; it is no masked language"
                " model"
            )

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Weights, (B, C), for C tokens of the vocabulary."""
        if options.top_k is None or options.top_k >= values.shape[1]:
            return values
        largest, places = values.topk(options.top_k, dim=1, sorted=False)
        return torch.zeros_like(values).scatter_(1, places, largest)

    def _values(self, forward: Forward, batch: Sequence[Prepared]) -> Tensor:
        # It grows with the logit, so that of the largest is the largest.
        return super()._values(forward, batch).relu().log1p()

    def _results(
        self,
        values: Tensor,
        outputs: Outputs,
        keywords: Mapping[str, Any],  # noqa: ARG002 (`_finish` has used them)
    ) -> list[dict[str, Any]] | list[Encoded]:
        rows = values.numpy()
        indices = [np.flatnonzero(row) for row in rows]
        numbers = [row[places] for row, places in zip(rows, indices, strict=True)]
        if self._gives_json:
            return [
                Encoded(orjson.dumps({**head, "indices": places, "values": row}, option=NUMPY))
                for head, places, row in zip(outputs.heads, indices, numbers, strict=True)
            ]
        return [
            {**head, "indices": places.tolist(), "values": row}
            for head, places, row in zip(outputs.heads, indices, number_lists(numbers), strict=True)
        ]
