"""Pictures that are odd, or no pictures, and models that are none of their kind."""

import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from transformers.image_utils import load_image

from batchery import InvalidItem, ModelLoadError
from batchery.media_settings import MediaSettings
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.vision.classification import ImageClassificationModel
from batchery_worker.models.vision.detection import ObjectDetectionModel
from batchery_worker.models.vision.embedding import ImageEmbeddingModel
from support.pictures import draw, encode
from support.tiny_models import Build, run

PICTURE = draw(64, 48)


@pytest.fixture(scope="module")
def model(build_vision: Build) -> ImageEmbeddingModel:
    settings = ModelSettings(kind="image_embedding", model=str(build_vision("clip")))
    model = ImageEmbeddingModel(settings, MediaSettings(max_pixels=10_000))
    model.load("cpu")
    return model


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(PICTURE, "JPEG", exif=exif)


def animated(file_format: str) -> bytes:
    others = [draw(64, 48, seed) for seed in (1, 2)]
    return encode(PICTURE, file_format, save_all=True, append_images=others)


ODD = {
    "animated GIF": animated("GIF"),
    "animated WEBP": animated("WEBP"),
    "animated PNG": animated("PNG"),
    "CMYK": encode(PICTURE.convert("CMYK"), "JPEG"),
    "CMYK TIFF": encode(PICTURE.convert("CMYK"), "TIFF"),
    "grey": encode(PICTURE.convert("L")),
    "palette": encode(PICTURE.convert("P")),
    "one bit": encode(PICTURE.convert("1")),
    "transparent": encode(PICTURE.convert("RGBA")),
    "grey and transparent": encode(PICTURE.convert("LA")),
    "16 bit": encode(Image.fromarray(np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 21)),
    "one pixel high": encode(draw(64, 1)),
    **{f"turned {number}": turned(number) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_are_read_as_transformers_does(model: ImageEmbeddingModel, name: str) -> None:
    (found,) = run(model, [ODD[name]], normalize=False)
    image = load_image(Image.open(BytesIO(ODD[name])))
    inputs = model.reader.processor(images=[image], return_tensors="pt")
    with torch.inference_mode():
        expected = model.model.get_image_features(**inputs).pooler_output[0]
    np.testing.assert_allclose(found["vector"], expected, rtol=1e-4, atol=1e-5)


def png_with_pixels(width: int, height: int) -> bytes:
    """A small file that says to have so many pixels."""
    data = bytearray(encode(draw(8, 8)))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


def png_with_text(size: int) -> bytes:
    """A small file whose text is large."""
    info = PngInfo()
    info.add_text("a", "x" * size, zip=True)
    return encode(draw(8, 8), pnginfo=info)


BAD = {
    "no picture": (b"nothing at all", "is no picture of a format that is read"),
    "truncated": (encode(PICTURE)[:-300], "truncated"),
    "truncated JPEG": (encode(PICTURE, "JPEG")[:-300], "truncated"),
    "only a head": (encode(PICTURE)[:40], "image: "),
    "many pixels": (png_with_pixels(200, 200), "200 x 200 pixels are more than media.max_pixels"),
    "a bomb": (png_with_pixels(60_000, 60_000), "image: "),
    "a bomb that is refused by Pillow": (png_with_pixels(2**31 - 1, 2**31 - 1), "image: "),
    "a text bomb": (png_with_text(100_000_000), "cannot be read"),
    "no pixels": (png_with_pixels(0, 10), "image: "),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no picture"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture"),
    "sound": (b"RIFF\x24\0\0\0WAVEfmt ", "is no picture"),
    "a text": ({"text": 7}, "must be bytes"),
    "a long text": ({"text": "x" * 2_000_000}, "characters are more than max_chars"),
}


def test_bad_pictures_fail_alone_with_one_line(model: ImageEmbeddingModel) -> None:
    good = encode(PICTURE)
    (expected,) = run(model, [good])
    items = [good, *(item for item, _ in BAD.values()), good]
    first, *bad, last = run(model, items)
    assert first["vector"] == last["vector"] == pytest.approx(expected["vector"])
    for (_, problem), outcome in zip(BAD.values(), bad, strict=True):
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.exception, InvalidItem)
        text = str(outcome.exception)
        assert problem in text
        assert "\n" not in text
        assert len(text) < 400


def test_wrong_keywords_are_named(model: ImageEmbeddingModel) -> None:
    for keywords in ({"dimensions": 25}, {"dimensions": 0}, {"threshold": 1}, {"encoding": "x"}):
        (found,) = model.preprocess([encode(PICTURE)], **keywords)
        assert str(found.exception).startswith(f"keyword {next(iter(keywords))}")


def refuse(kind: type[Any], name: str, folder: Path, **settings: Any) -> str:
    made = kind(ModelSettings(kind=name, model=str(folder), **settings))
    with pytest.raises(ModelLoadError) as error:
        made.load("cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_that_do_not_fit_the_kind_are_refused(
    build_vision: Build, build: Build, tmp_path: Path
) -> None:
    vit, clip = build_vision("vit"), build_vision("clip")
    text = refuse(ImageClassificationModel, "image_classification", build("bert"))
    assert "a bert model is none of the kind image_classification" in text
    text = refuse(ImageClassificationModel, "image_classification", vit)
    assert "its checkpoint has no trained classification head" in text
    text = refuse(ObjectDetectionModel, "object_detection", vit)
    assert "a vit model is none of the kind object_detection" in text
    text = refuse(ImageEmbeddingModel, "image_embedding", build("bert"))
    assert "has no image processor" in text
    assert "dimensions = 99" in refuse(ImageEmbeddingModel, "image_embedding", clip, dimensions=99)
    for path in vit.iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    text = refuse(ImageEmbeddingModel, "image_embedding", tmp_path)
    assert "has no image processor" in text
