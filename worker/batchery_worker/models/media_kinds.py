"""What kinds of pictures and of sound make of a model's numbers: vectors, and scores of labels.

Each stands before the model of its medium among the classes of a kind.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize

from batchery_worker.models.inputs import ClassificationKeywords, EmbeddingKeywords
from batchery_worker.models.labels import Labels, name_scores
from batchery_worker.models.media_model import MediaModel, Prepared
from batchery_worker.models.text_items import write_vectors


class TowerModel(MediaModel):
    """A model whose pictures or sounds, and perhaps texts, become one vector each."""

    def _embed(self, items: Sequence[Prepared]) -> Tensor:
        """Runs a pass over items of one shape; returns vectors, (B, D)."""
        if items[0].is_text:
            return self._embed_texts(items)
        vectors: Tensor = getattr(self.model, self._tower)(**self._stack(items)).pooler_output
        return vectors

    def _embed_texts(self, texts: Sequence[Prepared]) -> Tensor:
        filled = self.reader.tokenizer.pad(
            {name: [each.inputs[name] for each in texts] for name in texts[0].inputs},
            return_tensors="np",
        )
        vectors: Tensor = self.model.get_text_features(**self._send(filled)).pooler_output
        return vectors


class VectorModel(TowerModel):
    """Gives the vectors that a pass makes; a result has the shape of `batchery.Embedding`."""

    keywords = EmbeddingKeywords

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

    def _read_keywords(self, keywords: Mapping[str, Any]) -> EmbeddingKeywords:
        options: EmbeddingKeywords = super()._read_keywords(keywords)
        if options.dimensions is not None:
            options.check(self.dimensions)
        return options

    def _compute(self, items: Sequence[Prepared], options: Any) -> Tensor:
        vectors = self._embed(items)
        self.dimensions = vectors.shape[1]
        vectors = vectors[:, : options.dimensions or self.settings.dimensions].float()
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return normalize(vectors, dim=-1) if scale else vectors

    def _results(self, items: Sequence[Prepared], values: Tensor, options: Any) -> Sequence[Any]:
        encoded = write_vectors(list(map(self.head, items)), values.numpy(), options.encoding)
        return encoded if self._gives_json else [each.value for each in encoded]


class LabelModel(MediaModel):
    """Gives `Labels` and their scores; a result has the shape of `batchery.Classification`."""

    keywords = ClassificationKeywords

    trained_part = ("classification head", "classification")

    def _finish_load(self) -> None:
        super()._finish_load()
        self._labels = Labels(self.model.config, self.settings.multi_label)

    def _compute(self, items: Sequence[Prepared], options: Any) -> Tensor:
        """Scores, (B, C)."""
        logits: Tensor = self.model(**self._stack(items)).logits.float()
        return self._labels.score(logits, raw_scores=options.raw_scores)

    def _results(
        self, items: Sequence[Prepared], values: Tensor, options: Any
    ) -> list[dict[str, Any]]:
        heads = list(map(self.head, items))
        return name_scores(heads, values, self._labels.names, options.top_k)
