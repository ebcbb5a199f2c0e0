"""Makes pixels of pictures, and tokens of the texts beside them, as transformers does."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from transformers import AutoConfig, AutoImageProcessor

from batchery.errors import InvalidItem
from batchery_worker.media.reader import Reader
from batchery_worker.models.inputs import check_text
from batchery_worker.models.media_model import TokenizedText, tokenize
from batchery_worker.models.source import ModelSource, load_tokenizer, loading, reason

#: Formats that are decoded by code that reads pictures and does nothing else: that of EPS runs a
#: program, and that of WMF asks the system.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")

#: Length to which SigLIP was trained to fill up texts, and is by transformers' pipeline.
SIGLIP_TOKENS = 64


class Picture(NamedTuple):
    """A picture as it goes through a model."""

    #: Inputs of the model without their batch dimension: `pixel_values`, (C, H, W) float32, and
    #: with some models `pixel_mask`, (H, W) int64.
    inputs: Mapping[str, NDArray[Any]]
    #: Pixels before they were scaled.
    height: int
    width: int


class ImageReader(Reader):
    """Reads pictures by the image processor of the model's files."""

    fields: ClassVar[tuple[str, ...]] = ("image",)

    def open(self) -> None:
        """Loads the processor.

        Raises:
            ModelLoadError: The model's files have none.
        """
        Image.init()
        self._formats = [each for each in FORMATS if each in Image.OPEN]
        with loading(self.settings.model):
            source = ModelSource(self.settings)
            load: Any = AutoImageProcessor.from_pretrained
            try:
                self.processor = load(source.name, **source.options)
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = f"has no image processor, so it takes no pictures: {reason(error)}"
                raise ValueError(why) from error

    def read(self, data: bytes | str, keywords: Mapping[str, Any]) -> Picture:  # noqa: ARG002
        """Reads one picture; see `Reader.read`."""
        if isinstance(data, str):
            raise InvalidItem("text: this model takes pictures alone")
        image = self._open_image(data)
        inputs = self.processor(images=[image], return_tensors="pt")
        pixels = {name: inputs[name][0].numpy() for name in inputs if name in INPUTS}
        return Picture(pixels, image.height, image.width)

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


#: What an image processor makes of a picture that models take.
INPUTS = ("pixel_values", "pixel_mask")


class ImageTextReader(ImageReader):
    """Reads texts, too, for models that have them in the same space."""

    fields: ClassVar[tuple[str, ...]] = ("image", "text")

    def open(self) -> None:
        """Loads the processor, and the tokenizer of a model that takes texts."""
        super().open()
        source = ModelSource(self.settings)
        config = AutoConfig.from_pretrained(source.name, **source.options)
        self.tokenizer: Any = None
        if not hasattr(config, "text_config"):
            return
        self.tokenizer = load_tokenizer(source)
        is_siglip = "siglip" in config.model_type
        positions = SIGLIP_TOKENS if is_siglip else config.text_config.max_position_embeddings
        self._options = {
            "truncation": True,
            "max_length": min(self.settings.max_length or positions, positions),
            "padding": "max_length" if is_siglip else False,
        }

    def read(self, data: bytes | str, keywords: Mapping[str, Any]) -> Any:
        """Reads one picture or text; see `Reader.read`."""
        if isinstance(data, bytes) or self.tokenizer is None:
            return super().read(data, keywords)
        return self.tokenize(check_text("text", data, self.settings.max_chars))

    def tokenize(self, text: str) -> TokenizedText:
        """Tokenizes a text as transformers' pipeline does.

        Raises:
            InvalidItem: It is too long, and the settings refuse such texts.
        """
        return tokenize(self.tokenizer, text, self.settings, self._options)
