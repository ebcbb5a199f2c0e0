"""Vectors of pictures, and of texts in the same space where a model knows both."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoModel

from batchery_worker.models.media_kinds import TowerModel, VectorModel
from batchery_worker.models.media_model import Prepared
from batchery_worker.models.vision.image_model import ImageModel
from batchery_worker.models.vision.reader import ImageTextReader


class ImageTowerModel(TowerModel, ImageModel):
    """A model whose pictures, and perhaps texts, become one vector each."""

    Reader = ImageTextReader

    auto_class: ClassVar[Any] = AutoModel

    def _check_missing(self, missing: Sequence[str]) -> None:
        super()._check_missing(missing)
        # Classifiers are saved without the pooler, which is random then.
        self._has_pooler = not any("pooler" in key.split(".") for key in missing)

    def _finish_load(self) -> None:
        super()._finish_load()
        self.has_texts = hasattr(self.model.config, "text_config")
        takes_pictures = self.model.main_input_name == "pixel_values"
        if not takes_pictures and not hasattr(self.model, self._tower):
            raise ValueError(f"takes {self.model.main_input_name}, and no pictures")
        if self.has_texts and self.settings.pooling != "auto":
            raise ValueError(f"pooling = {self.settings.pooling!r}, but its files decide that")

    def _embed(self, items: Sequence[Prepared]) -> Tensor:
        if self.has_texts:
            return super()._embed(items)
        output, pooling = self.model(**self._stack(items)), self.settings.pooling
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if pooling == "auto" and self._has_pooler and pooled is not None:
            return pooled.flatten(1)
        tokens: Tensor = output.last_hidden_state
        if pooling == "mean":
            return tokens.mean(dim=1)
        return tokens[:, -1 if pooling == "last" else 0]


class ImageEmbeddingModel(VectorModel, ImageTowerModel):
    """Turns pictures, and texts of models such as CLIP and SigLIP, into vectors of one space.

    An item is a picture, or `{"text": ...}`. Keywords of a job: see `EmbeddingKeywords`. A result
    has the shape of `batchery.Embedding`.
    """
