"""What kinds of pictures and of sound make of a model's numbers: vectors, and scores of labels.

Each stands before the model of its medium among the classes of a kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from batchery.errors import InvalidItem
from batchery_worker.models.inputs import ImageClassificationKeywords, ImageEmbeddingKeywords
from batchery_worker.models.labels import Labels, name_scores
from batchery_worker.models.media_model import MediaModel
from batchery_worker.models.text_items import write_vectors


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
        heads = [self.head(each) for each in items]
        encoded = write_vectors(heads, values[0].numpy(), options.encoding)
        return encoded if self._gives_json else [each.value for each in encoded]


class LabelModel(MediaModel):
    """Gives `Labels` and their scores; a result has the shape of `batchery.Classification`."""

    keywords = ImageClassificationKeywords

    trained_part = ("classification head", "classification")

    def _finish_load(self) -> None:
        super()._finish_load()
        self._labels = Labels(self.model.config, self.settings.multi_label)

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        """Scores, (B, C)."""
        logits: Tensor = self.model(**self._stack(items)).logits.float()
        return [self._labels.score(logits, raw_scores=options.raw_scores)]

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> list[dict[str, Any]]:
        heads = [self.head(each) for each in items]
        return name_scores(heads, values[0], self._labels.names, options.top_k)
