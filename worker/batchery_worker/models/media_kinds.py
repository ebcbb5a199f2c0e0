"""What kinds of pictures and of sound make of a model's numbers: vectors, and scores of labels.

Each stands before the model of its medium among the classes of a kind.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from batchery.errors import InvalidItem
from batchery_worker.models.inputs import ImageClassificationKeywords, ImageEmbeddingKeywords
from batchery_worker.models.media_model import MediaModel
from batchery_worker.models.text_items import encode_results


class VectorModel(MediaModel):
    """Gives the vectors that a pass makes; a result has the shape of `batchery.Embedding`."""

    keywords = ImageEmbeddingKeywords

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    #: D of its vectors; 0 before the first pass.
    dimensions = 0

    _gives_json = False

    def give_json(self) -> None:
        """Makes results `Encoded` from now on: they leave the process."""
        self._gives_json = True

    def _check(self) -> None:
        super()._check()
        if (self.settings.dimensions or 1) > self.dimensions:
            has = f"its vectors have {self.dimensions}"
            raise ValueError(f"dimensions = {self.settings.dimensions}, but {has}")

    def _read_keywords(self, keywords: Mapping[str, Any]) -> ImageEmbeddingKeywords:
        options: ImageEmbeddingKeywords = super()._read_keywords(keywords)
        if self.dimensions and (options.dimensions or 1) > self.dimensions:
            raise InvalidItem(
                f"keyword dimensions = {options.dimensions}: the model's vectors have"
                f" {self.dimensions}"
            )
        return options

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        vectors = self._embed(items)
        self.dimensions = vectors.shape[1]
        vectors = vectors[:, : options.dimensions or self.settings.dimensions].float()
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return [normalize(vectors, dim=-1) if scale else vectors]

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> Sequence[Any]:
        vectors: Any = values[0].numpy()
        if options.encoding == "base64":
            vectors = [b64encode(row.astype("<f4").tobytes()).decode("ascii") for row in vectors]
        encoded = encode_results([self.head(each) for each in items], vector=vectors)
        return encoded if self._gives_json else [each.value for each in encoded]


class LabelModel(MediaModel):
    """Gives labels and their scores; a result has the shape of `batchery.Classification`.

    Labels are named as in the model's config.

    Scores are a softmax over the labels, or, where several labels may hold (the setting
    `multi_label`, else the config's `problem_type`) or there is one, a sigmoid of each. Those of a
    regression, by `problem_type`, are the model's outputs as they are, of any size.
    """

    keywords = ImageClassificationKeywords

    trained_part = ("classification head", "classification")

    def _finish_load(self) -> None:
        super()._finish_load()
        config, several = self.model.config, self.settings.multi_label
        self.labels = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels of id2label have the same name; rename one")
        self._is_regression = several is None and config.problem_type == "regression"
        if several is None:
            is_several = config.problem_type == "multi_label_classification"
            several = is_several or config.num_labels == 1
        self.multi_label = several

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        """Scores, (B, C)."""
        logits: Tensor = self.model(**self._stack(items)).logits.float()
        if options.raw_scores or self._is_regression:
            return [logits]
        return [logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)]

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> list[dict[str, Any]]:
        heads = [self.head(each) for each in items]
        return name_scores(heads, values[0], self.labels, options.top_k)


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
