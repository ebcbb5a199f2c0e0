"""Makes pixels of pictures, as transformers does."""

from io import BytesIO
from typing import Any, ClassVar

from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoImageProcessor

from batchery.errors import InvalidItem
from batchery_worker.models.media_model import ModelReader, Prepared, TextReader

#: Formats that are decoded by code that reads pictures and does nothing else: that of EPS runs a
#: program, and that of WMF asks the system.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")


class ImageReader(ModelReader):
    """Reads pictures by the image processor of the model's files."""

    fields: ClassVar[tuple[str, ...]] = ("image",)

    processor_class: ClassVar[Any] = AutoImageProcessor

    def open(self) -> None:
        """Loads the processor, and the decoders."""
        super().open()
        Image.init()
        self._formats = [each for each in FORMATS if each in Image.OPEN]

    def read(self, data: bytes | str) -> Prepared:
        """Reads one picture; see `Reader.read`."""
        assert isinstance(data, bytes)
        image = self._open_image(data)
        found = self.processor(images=[image], return_tensors="pt")
        inputs = {name: numbers[0].numpy() for name, numbers in found.items()}
        return Prepared(inputs, size=(image.height, image.width))

    def _open_image(self, data: bytes) -> Image.Image:
        """Decodes a picture as transformers' `load_image` does: upright, RGB, the first frame."""
        try:
            image = Image.open(BytesIO(data), formats=self._formats)
        except UnidentifiedImageError:
            raise InvalidItem("image: is no picture of a format that is read") from None
        # Nothing was decoded so far.
        if image.width * image.height > self.media.max_pixels:
            raise InvalidItem(
                f"image: {image.width} x {image.height} pixels are more than"
                f" media.max_pixels = {self.media.max_pixels}"
            )
        return ImageOps.exif_transpose(image).convert("RGB")


class ImageTextReader(TextReader, ImageReader):
    """Reads texts, too."""

    fields: ClassVar[tuple[str, ...]] = ("image", "text")
