"""What all models of pictures share: passes over pictures of one size, and results by item."""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from batchery.outcomes import Failed
from batchery_worker.models.hardware.transfers import PendingCopy
from batchery_worker.models.media_model import MediaModel
from batchery_worker.models.vision.reader import ImageReader, Picture, TokenizedText

#: Side of a patch of models that have none, in pixels.
USUAL_PATCH_PIXELS = 16

#: Size of the picture that models are checked with, in pixels.
SAMPLE_SIZE = (64, 48)


class Part(NamedTuple):
    """What a pass makes of the items of a micro-batch that are of one size."""

    #: Their places in the micro-batch.
    places: Sequence[int]
    #: Values on their way to the CPU, one row per item each, float32.
    pending: Sequence[PendingCopy]


class Outputs(NamedTuple):
    """What the passes over a micro-batch give."""

    batch: Sequence[Any]
    parts: Sequence[Part]


class ImageModel(MediaModel):
    """A transformers model of pictures; subclasses say what becomes of its output.

    Pictures of several sizes go through it in several passes: filled up to one size, they would
    have other results than alone.
    """

    Reader = ImageReader

    reader: ImageReader

    def _finish_load(self) -> None:
        side = getattr(getattr(self.model.config, "vision_config", None), "patch_size", None)
        side = side or getattr(self.model.config, "patch_size", None)
        self._patch_pixels = side if isinstance(side, int) else USUAL_PATCH_PIXELS
        # Of models with two towers, that of pictures.
        function = getattr(self.model, "get_image_features", self.model.forward)
        self._parameters = inspect.signature(function).parameters

    def sample(self) -> bytes:
        """A picture of gradients, as PNG."""
        width, height = SAMPLE_SIZE
        file = BytesIO()
        Image.linear_gradient("L").resize((width, height)).convert("RGB").save(file, "PNG")
        return file.getvalue()

    def tokens(self, prepared: Any) -> int:
        """The patches of a picture, or the tokens of a text."""
        if isinstance(prepared, TokenizedText):
            return len(prepared.inputs["input_ids"])
        _, height, width = prepared.inputs["pixel_values"].shape
        side = self._patch_pixels
        return int(ceil(height / side) * ceil(width / side))

    def head(self, prepared: Any) -> dict[str, Any]:
        """The fields that every result has, of one item."""
        head: dict[str, Any] = {"tokens": self.tokens(prepared)}
        if isinstance(prepared, TokenizedText) and prepared.truncated:
            head["truncated"] = True
        return head

    def _start(self, batch: Sequence[Any], options: Any) -> Outputs:
        groups = defaultdict[Any, list[int]](list)
        for place, prepared in enumerate(batch):
            shape = None
            if isinstance(prepared, Picture):
                shape = prepared.inputs["pixel_values"].shape
            groups[shape].append(place)
        parts = []
        for places in groups.values():
            values = self._compute([batch[place] for place in places], options)
            parts.append(Part(places, [self._to_host.start(each.float()) for each in values]))
        return Outputs(batch, parts)

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        """Runs a pass over items of one size.

        Returns:
            What is read of its output, one row per item each.
        """
        raise NotImplementedError

    def _stack(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Inputs of a pass over pictures of one size, on the device."""
        names = [name for name in pictures[0].inputs if name in self._parameters]
        return self._send(
            {name: np.stack([each.inputs[name] for each in pictures]) for name in names}
        )

    def postprocess(self, outputs: Outputs, **keywords: Any) -> list[Any]:
        """Waits for the values of a micro-batch and makes its results, in batch order."""
        options = self._read_keywords(keywords)
        results: list[Any] = [None] * len(outputs.batch)
        for places, pending in outputs.parts:
            values = [each.wait() for each in pending]
            items = [outputs.batch[place] for place in places]
            # JSON has no NaN, and no caller can use one.
            finite = [each.isfinite().flatten(1).all(dim=1).tolist() for each in values]
            made = self._results(items, values, options)
            for place, result, *good in zip(places, made, *finite, strict=True):
                bad = Failed(f"the model's output is not finite in {self.model.dtype}")
                results[place] = result if all(good) else bad
        return results

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> Sequence[Any]:
        """Makes one result per item, each of which begins with its head.

        Args:
            items: Prepared, of one pass.
            values: What the pass made, on the CPU.
            options: The keywords of the batch.
        """
        raise NotImplementedError
