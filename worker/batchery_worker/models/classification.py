"""What labels texts, and what scores them for a query.

Scores of labels are those of transformers' pipeline, and a reranker's are those of
sentence-transformers.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import AutoModelForSequenceClassification

from batchery_worker.models.inputs import RerankKeywords, TextClassificationKeywords, check_fields
from batchery_worker.models.labels import Labels, name_scores
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import Cut, Input

#: The query of items that are made of a text alone.
SAMPLE_QUERY = "what is it about"


class ClassificationModel(TextModel):
    """Labels texts and pairs of texts, with any sequence classification model of transformers.

    An item is a text, a list of token ids, or `{"text": ..., "text_pair": ...}`, of which the
    longer text is cut if they are too long. Keywords of a job: see `TextClassificationKeywords`. A
    result has the shape of `batchery.Classification`; for its scores see `Labels`.
    """

    auto_class = AutoModelForSequenceClassification

    keywords = TextClassificationKeywords

    reading = "logits"

    trained_part = ("classification head", "classification")

    def _finish_load(self) -> None:
        self._labels = Labels(self.model.config, self.settings.multi_label)
        self._width = len(self._labels.names)

    def _cut(self, options: Any) -> Cut:
        return super()._cut(options)._replace(max_length=options.max_length)

    def _input(self, item: Any, prompt: str) -> Input:
        if not isinstance(item, dict):
            return super()._input(item, prompt)
        text, pair = check_fields(item, ("text", "text_pair"), self.settings.max_chars)
        return text, pair

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Scores, (B, C)."""
        return self._labels.score(values, raw_scores=options.raw_scores)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        top_k = self._read_keywords(keywords).top_k
        return name_scores(outputs.heads, values, self._labels.names, top_k)


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

    _width = 1

    def _finish_load(self) -> None:
        labels = self.library.num_labels
        if labels != 1:
            raise ValueError(
                f"has {labels} labels, and a reranker has one; kind = 'classification' takes pairs"
                " of texts, too"
            )

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
