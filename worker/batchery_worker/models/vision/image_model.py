"""What all models of pictures share: passes over pictures of one size."""

from io import BytesIO
from math import ceil

from PIL import Image

from batchery_worker.models.media_model import MediaModel, Prepared
from batchery_worker.models.vision.reader import ImageReader

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

    _tower = "get_image_features"

    def _finish_load(self) -> None:
        config = getattr(self.model.config, "vision_config", self.model.config)
        side = getattr(config, "patch_size", None)
        self._patch_pixels = side if isinstance(side, int) else USUAL_PATCH_PIXELS

    def sample(self) -> bytes:
        """A picture of gradients, as PNG."""
        file = BytesIO()
        Image.linear_gradient("L").resize(SAMPLE_SIZE).convert("RGB").save(file, "PNG")
        return file.getvalue()

    def _count(self, prepared: Prepared) -> int:
        """Its patches."""
        _, height, width = prepared.inputs["pixel_values"].shape
        side = self._patch_pixels
        return int(ceil(height / side) * ceil(width / side))
