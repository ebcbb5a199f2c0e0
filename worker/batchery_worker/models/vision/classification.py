"""What labels pictures; scores are those of transformers' pipelines."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModelForImageClassification, AutoModelForZeroShotImageClassification

from batchery_worker.models.inputs import ZeroShotKeywords
from batchery_worker.models.labels import name_scores
from batchery_worker.models.media_kinds import LabelModel
from batchery_worker.models.media_model import Prepared
from batchery_worker.models.vision.embedding import ImageTowerModel
from batchery_worker.models.vision.image_model import ImageModel
from batchery_worker.models.vision.reader import ImageTextReader

#: How many sets of labels are remembered as vectors.
MAX_LABEL_SETS = 64


class ImageClassificationModel(LabelModel, ImageModel):
    """Labels pictures, with any image classification model of transformers.

    An item is a picture. Keywords of a job: see `ClassificationKeywords`. For scores see
    `LabelModel`.
    """

    auto_class = AutoModelForImageClassification


class LabelledImageReader(ImageTextReader):
    """Reads pictures alone; the texts are those of the labels."""

    fields: ClassVar[tuple[str, ...]] = ("image",)


class ZeroShotImageClassificationModel(ImageTowerModel):
    """Labels pictures with labels that each job brings, with models such as CLIP and SigLIP.

    An item is a picture. Keywords of a job: see `ZeroShotKeywords`; `labels` is required. A result
    has the shape of `batchery.Classification`, with the scores of all labels.

    Scores are a softmax over the labels; with SigLIP, which was trained so, a sigmoid of each.
    """

    auto_class = AutoModelForZeroShotImageClassification

    keywords = ZeroShotKeywords

    Reader = LabelledImageReader

    sample_keywords: ClassVar[Mapping[str, Any]] = {"labels": ["a", "b"]}

    def _finish_load(self) -> None:
        super()._finish_load()
        if not (self.has_texts and hasattr(self.model, "logit_scale")):
            kind = self.model.config.model_type
            raise ValueError(f"a {kind} model compares no pictures with texts as CLIP does")
        self._is_sigmoid = "siglip" in self.model.config.model_type
        self._embed_labels = lru_cache(MAX_LABEL_SETS)(self._find_vectors)

    def _find_vectors(self, template: str, labels: tuple[str, ...]) -> Tensor:
        """Vectors of labels, (C, D), each of length 1."""
        texts = [self.reader.tokenize(template.format(label)) for label in labels]
        return normalize(self._embed_texts(texts), dim=-1)

    def _compute(self, items: Sequence[Prepared], options: Any) -> Tensor:
        """Scores, (B, C)."""
        labels = self._embed_labels(options.template, tuple(options.labels))
        pictures = normalize(self._embed(items), dim=-1)
        scores = self.model.logit_scale.exp() * pictures @ labels.t()
        logits: Tensor = (scores + getattr(self.model, "logit_bias", 0.0)).float()
        if options.raw_scores:
            return logits
        return logits.sigmoid() if self._is_sigmoid else logits.softmax(dim=-1)

    def _results(
        self, items: Sequence[Prepared], values: Tensor, options: Any
    ) -> list[dict[str, Any]]:
        heads, labels = list(map(self.head, items)), options.labels
        return name_scores(heads, values, labels, len(labels))
