"""Kinds of pictures: results are those of transformers, one by one, for mixed sizes in a batch."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from batchery import Classification, Detection, Embedding
from support.pictures import draw_many
from support.tiny_models import Build, Load, run

PICTURES = draw_many(9)
TEXTS = ["the cat sat on the mat", "a dog", "rain falls on green hills while the river runs"]


def open_all(pictures: Sequence[bytes]) -> list[Image.Image]:
    return [load_image(Image.open(BytesIO(each))) for each in pictures]


def pipeline(task: str, folder: Path) -> Any:
    make: Any = transformers.pipeline
    return make(task, model=str(folder), device="cpu")


@pytest.mark.parametrize("architecture", ["clip", "siglip"])
def test_pictures_and_texts_have_the_vectors_of_the_model(
    load: Load, build_vision: Build, architecture: str
) -> None:
    folder = build_vision(architecture)
    model = load("image_embedding", folder, normalize=False)
    found = run(model, [*PICTURES, *({"text": text} for text in TEXTS)])
    theirs: Any = transformers.AutoModel.from_pretrained(folder)
    load_processor: Any = transformers.AutoProcessor.from_pretrained
    processor = load_processor(folder)
    padding = {"padding": "max_length", "max_length": 64} if architecture == "siglip" else {}
    with torch.inference_mode():
        expected = [
            *(
                theirs.get_image_features(
                    **processor(images=[image], return_tensors="pt")
                ).pooler_output[0]
                for image in open_all(PICTURES)
            ),
            *(
                theirs.get_text_features(
                    **processor(text=[text], return_tensors="pt", **padding)
                ).pooler_output[0]
                for text in TEXTS
            ),
        ]
    for result, vector in zip(found, expected, strict=True):
        np.testing.assert_allclose(result["vector"], vector, rtol=1e-4, atol=1e-5)
        Embedding.model_validate(result)


@pytest.mark.parametrize("architecture", ["dinov2", "vit"])
def test_model_of_pictures_alone_has_the_vectors_of_its_pooler(
    load: Load, build_vision: Build, architecture: str
) -> None:
    folder = build_vision(architecture)
    found = run(load("image_embedding", folder, normalize=False), PICTURES)
    features = pipeline("image-feature-extraction", folder)
    for result, image in zip(found, open_all(PICTURES), strict=True):
        (expected,) = features(image, pool=True)
        np.testing.assert_allclose(result["vector"], expected, rtol=1e-4, atol=1e-5)


def test_classifier_without_a_pooler_has_the_vectors_of_its_first_token(
    load: Load,
    build_vision: Build,
) -> None:
    folder = build_vision("vit-labels")
    found = run(load("image_embedding", folder, normalize=False), PICTURES)
    features = pipeline("image-feature-extraction", folder)
    for result, image in zip(found, open_all(PICTURES), strict=True):
        expected = features(image)[0][0]
        np.testing.assert_allclose(result["vector"], expected, rtol=1e-4, atol=1e-5)


def test_labels_of_pictures(load: Load, build_vision: Build) -> None:
    folder = build_vision("vit-labels")
    found = run(load("image_classification", folder), PICTURES, top_k=3)
    theirs = pipeline("image-classification", folder)
    for result, image in zip(found, open_all(PICTURES), strict=True):
        expected = {each["label"]: each["score"] for each in theirs(image)}
        assert [*result["scores"]] == [*expected]
        assert result["scores"] == pytest.approx(expected, rel=1e-4)
        assert result["label"] == next(iter(expected))
        Classification.model_validate(result)
    assert len({result["label"] for result in found}) > 1


@pytest.mark.parametrize("architecture", ["clip", "siglip"])
def test_labels_that_a_job_brings(load: Load, build_vision: Build, architecture: str) -> None:
    folder, labels = build_vision(architecture), ["a cat", "the old garden", "tea and salt"]
    model = load("zero_shot_image_classification", folder)
    found = run(model, PICTURES, labels=labels, template="the {} on hills")
    theirs = pipeline("zero-shot-image-classification", folder)
    for result, image in zip(found, open_all(PICTURES), strict=True):
        answer = theirs(image, candidate_labels=labels, hypothesis_template="the {} on hills")
        expected = {each["label"]: each["score"] for each in answer}
        assert [*result["scores"]] == [*expected]
        assert result["scores"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        Classification.model_validate(result)


def test_objects_in_pictures(load: Load, build_vision: Build) -> None:
    folder = build_vision("detr")
    found = run(load("object_detection", folder), PICTURES, threshold=0.3)
    theirs = pipeline("object-detection", folder)
    for result, image in zip(found, open_all(PICTURES), strict=True):
        expected = theirs(image, threshold=0.3)
        assert [each["label"] for each in result["objects"]] == [each["label"] for each in expected]
        for own, their in zip(result["objects"], expected, strict=True):
            assert own["score"] == pytest.approx(their["score"], rel=1e-4)
            assert own["box"] == pytest.approx(their["box"], abs=1)
        assert (result["width"], result["height"]) == image.size
        Detection.model_validate(result)
    assert any(result["objects"] for result in found)
