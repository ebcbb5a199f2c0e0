"""Reranking: how well each text fits a query."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import AutoModelForSequenceClassification

from batchery_worker.models.inputs import RerankKeywords, check_fields
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.text_model import Outputs
from batchery_worker.models.tokenizer import Input

#: The query of items that are made of a text alone.
SAMPLE_QUERY = "what is it about"


class RerankModel(SentenceModel):
    """Scores texts for a query, with any cross-encoder: a classification model of one label.

    An item is `{"query": ..., "text": ...}`. Of a pair that is too long, the longer one is cut.
    Keywords of a job: see `RerankKeywords`. A result has the shape of `batchery.Score`.
    """

    auto_class = AutoModelForSequenceClassification

    library_class = "CrossEncoder"

    keywords = RerankKeywords

    reading = "logits"

    trained_part = ("classification head", "reranking")

    def _finish_load(self) -> None:
        labels = self.library.num_labels
        if labels != 1:
            raise ValueError(
                f"has {labels} labels, and a reranker has one; kind = 'classification' takes pairs"
                " of texts, too"
            )

    def _find_problem(self, values: Tensor) -> str:
        shape = tuple(values.shape[1:])
        return "" if shape == (1,) else f"gives {shape} scores; it is not a reranker"

    def sample_item(self, text: str) -> dict[str, str]:
        """An item that has this text, to check, warm up or measure the model with."""
        return {"query": SAMPLE_QUERY, "text": text}

    def _input(self, item: Any, prompt: str) -> Input:  # noqa: ARG002 (the library's code puts it)
        query, text = check_fields(item, ("query", "text"), self.settings.max_chars)
        return query, text

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """The model's outputs, (B, 1)."""
        scores: Tensor = features["scores"].float()
        return scores.reshape(-1, 1)

    def _finish(self, values: Tensor, options: Any) -> Tensor:  # noqa: ARG002 (`_results` does)
        """The model's outputs, (B, 1)."""
        return values

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        # In float32 all outputs from 17 on would have the score 1, and no order.
        scores = values[:, 0].double()
        if not self._read_keywords(keywords).raw_scores:
            scores = scores.sigmoid()
        return [
            {**head, "score": score}
            for head, score in zip(outputs.heads, scores.tolist(), strict=True)
        ]
