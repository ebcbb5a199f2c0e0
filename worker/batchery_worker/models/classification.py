"""Text classification: one label per text, and how sure the model is."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import AutoModelForSequenceClassification

from batchery.errors import ModelLoadError
from batchery_worker.models.inputs import ClassificationKeywords, check_fields
from batchery_worker.models.source import ModelSource, check_head
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import Cut, Input


class ClassificationModel(TextModel):
    """Labels texts and pairs of texts, with any sequence classification model of transformers.

    An item is a text, a list of token ids, or `{"text": ..., "text_pair": ...}`, of which the
    longer text is cut if they are too long. Keywords of a job: see `ClassificationKeywords`. A
    result has the shape of `batchery.Classification`; labels are named as in the model's config.

    Scores are a softmax over the labels, or, where several labels may hold (the setting
    `multi_label`, else the config's `problem_type`) or there is one, a sigmoid of each. Those of a
    regression, by `problem_type`, are the model's outputs as they are, of any size.
    """

    auto_class = AutoModelForSequenceClassification

    keywords = ClassificationKeywords

    reading = "logits"

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_head(source, missing, "classification head", "classification")
        config = self.model.config
        self.labels = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(set(self.labels)) < len(self.labels):
            raise ModelLoadError(
                f"model {source.name!r}: two labels of id2label have the same name; rename one"
            )
        self.multi_label = self.settings.multi_label
        self._is_regression = self.multi_label is None and config.problem_type == "regression"
        if self.multi_label is None:
            is_single = config.num_labels == 1
            self.multi_label = is_single or config.problem_type == "multi_label_classification"

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        shape = outputs.pending.wait().shape[1:]
        if shape != (len(self.labels),):
            raise ModelLoadError(
                f"model {source.name!r}: gives {tuple(shape)} scores for"
                f" {len(self.labels)} labels; it is not a text classification model"
            )

    def _cut(self, options: Any) -> Cut:
        return super()._cut(options)._replace(max_length=options.max_length)

    def _input(self, item: Any, prompt: str) -> Input:
        if not isinstance(item, dict):
            return super()._input(item, prompt)
        text, pair = check_fields(item, ("text", "text_pair"), self.settings.max_chars)
        return text, pair

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Scores, (B, C)."""
        if options.raw_scores or self._is_regression:
            return values
        return values.sigmoid() if self.multi_label else values.softmax(dim=-1)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        top_k = self._read_keywords(keywords).top_k
        scores, places = values.topk(min(top_k or 1, len(self.labels)), dim=-1)
        heads, results = outputs.heads, []
        for head, row, row_places in zip(heads, scores.tolist(), places.tolist(), strict=True):
            named = {
                self.labels[place]: score for place, score in zip(row_places, row, strict=True)
            }
            best = self.labels[row_places[0]]
            result = {**head, "label": best, "score": row[0]}
            results.append(result if top_k is None else {**result, "scores": named})
        return results
