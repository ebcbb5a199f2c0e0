"""What finds objects in pictures."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForObjectDetection

from batchery_worker.models.inputs import DetectionKeywords
from batchery_worker.models.media_model import Prepared
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

    def _compute(self, items: Sequence[Prepared], options: Any) -> Tensor:  # noqa: ARG002
        """Of Q guesses, logits and then the four numbers of a box: (B, Q, C + 4)."""
        output = self.model(**self._stack(items))
        return torch.cat([output.logits, output.pred_boxes], dim=-1)

    def _results(
        self, items: Sequence[Prepared], values: Tensor, options: Any
    ) -> list[dict[str, Any]]:
        found = self.reader.processor.post_process_object_detection(
            SimpleNamespace(logits=values[..., :-4], pred_boxes=values[..., -4:]),
            options.threshold,
            torch.tensor([each.size for each in items]),
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
            height, width = item.size
            head = self.head(item)
            results.append({**head, "objects": objects, "width": width, "height": height})
        return results
