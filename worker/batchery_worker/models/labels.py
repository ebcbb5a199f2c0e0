"""The labels of classification models, and what outputs say of them, as transformers has it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Labels:
    """The labels of a model, named as in its config, and how their scores are made.

    Scores are a softmax over the labels, or, where several labels may hold (the setting
    `multi_label`, else the config's `problem_type`) or there is one, a sigmoid of each. Those of a
    regression, by `problem_type`, are the model's outputs as they are, of any size.

    Attributes:
        names: Of all C labels.
    """

    def __init__(self, config: Any, multi_label: bool | None) -> None:
        """Reads them.

        Args:
            config: Of the model.
            multi_label: The setting.

        Raises:
            ValueError: Two labels have the same name.
        """
        self.names = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(set(self.names)) < len(self.names):
            raise ValueError("two labels of id2label have the same name; rename one")
        self._is_regression = multi_label is None and config.problem_type == "regression"
        if multi_label is None:
            is_several = config.problem_type == "multi_label_classification"
            multi_label = is_several or config.num_labels == 1
        self._multi_label = multi_label

    def score(self, logits: Tensor, *, raw_scores: bool) -> Tensor:
        """Scores, (B, C), of the model's outputs, (B, C); with `raw_scores` these as they are."""
        if raw_scores or self._is_regression:
            return logits
        return logits.sigmoid() if self._multi_label else logits.softmax(dim=-1)


def name_scores(
    heads: Sequence[dict[str, Any]], scores: Tensor, labels: Sequence[str], top_k: int | None
) -> list[dict[str, Any]]:
    """Results that name the likeliest label, and with `top_k` the scores of so many.

    Args:
        heads: The fields that every result has, by item.
        scores: (B, C), on the CPU.
        labels: Names of all C.
        top_k: At least 1; None for the likeliest label alone.
    """
    best, places = scores.topk(min(top_k or 1, len(labels)), dim=-1)
    results = []
    for head, row, row_places in zip(heads, best.tolist(), places.tolist(), strict=True):
        named = {labels[place]: score for place, score in zip(row_places, row, strict=True)}
        result = {**head, "label": labels[row_places[0]], "score": row[0]}
        results.append(result if top_k is None else {**result, "scores": named})
    return results
