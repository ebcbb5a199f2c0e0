"""What finds objects in pictures."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForObjectDetection

from batchery_worker.models.inputs import DetectionKeywords
from batchery_worker.models.vision.image_model import ImageModel

#: Names of the sides of a box, in the order of the processor.
SIDES = ("xmin", "ymin", "xmax", "ymax")


class ObjectDetectionModel(ImageModel):
    """Finds objects in pictures, with DETR and its like.

    An item is a picture. Keywords of a job: see `DetectionKeywords`. A result has the shape of
    `batchery.Detection`; labels are named as in the model's config.
    """

    auto_class = AutoModelForObjectDetection

    keywords = DetectionKeywords

    trained_part = ("detection head", "detection")

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:  # noqa: ARG002
        """Logits of Q guesses, (B, Q, C), and their boxes, (B, Q, 4)."""
        output = self.model(**self._stack(items))
        return output.logits, output.pred_boxes

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> list[dict[str, Any]]:
        found = self.reader.processor.post_process_object_detection(
            SimpleNamespace(logits=values[0], pred_boxes=values[1]),
            options.threshold,
            torch.tensor([(each.height, each.width) for each in items]),
        )
        names = self.model.config.id2label
        results = []
        for item, guesses in zip(items, found, strict=True):
            boxes = guesses["boxes"].int().tolist()
            rows = zip(guesses["labels"].tolist(), guesses["scores"].tolist(), boxes, strict=True)
            objects = [
                {"label": names[label], "score": score, "box": dict(zip(SIDES, box, strict=True))}
                for label, score, box in rows
            ]
            size = {"width": item.width, "height": item.height}
            results.append({**self.head(item), "objects": objects, **size})
        return results
