"""What all models of pictures share: passes over pictures of one size, and results by item."""

import inspect
from collections.abc import Sequence
from io import BytesIO
from math import ceil
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from batchery_worker.models.media_model import MediaModel, TokenizedText
from batchery_worker.models.vision.reader import ImageReader, Picture

#: Side of a patch of models that have none, in pixels.
USUAL_PATCH_PIXELS = 16

#: Size of the picture that models are checked with, in pixels.
SAMPLE_SIZE = (64, 48)


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

    def _stack(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Inputs of a pass over pictures of one size, on the device."""
        names = [name for name in pictures[0].inputs if name in self._parameters]
        return self._send(
            {name: np.stack([each.inputs[name] for each in pictures]) for name in names}
        )
