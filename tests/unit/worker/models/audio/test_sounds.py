"""Labels and vectors of sound: results are those of transformers, for mixed lengths in a batch."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batchery import Classification, Embedding, InvalidItem, ModelLoadError, to_numpy
from batchery.outcomes import Failed
from batchery_worker.models.audio.decoding import decode_audio
from support.sounds import LABELS, RATE, make_recording
from support.tiny_models import Build, Load, run

SECONDS = (0.5, 1.7, 2.0, 0.9, 3.4, 1.7)
RECORDINGS = [make_recording(seconds, seed) for seed, seconds in enumerate(SECONDS)]
TEXTS = ["the cat sat on the mat", "a dog", "rain falls on green hills while the river runs"]


@pytest.mark.parametrize("architecture", ["labels", "labels-unmasked", "spectrogram-labels"])
def test_labels_have_the_scores_of_the_pipeline(
    load: Load, build_sound: Build, architecture: str
) -> None:
    folder = build_sound(architecture)
    found = run(load("audio_classification", folder), RECORDINGS, top_k=3)
    make: Any = transformers.pipeline
    pipe = make("audio-classification", model=str(folder), device="cpu", top_k=3)
    for result, recording in zip(found, RECORDINGS, strict=True):
        Classification.model_validate(result)
        expected = {
            each["label"]: each["score"] for each in pipe(decode_audio(recording, RATE, 60))
        }
        assert list(result["scores"]) == list(expected)
        np.testing.assert_allclose(
            list(result["scores"].values()), list(expected.values()), rtol=1e-4
        )
        assert result["label"] in LABELS.values()
    assert len({round(each["score"], 6) for each in found}) > 1


def test_sounds_and_texts_have_the_vectors_of_the_model(load: Load, build_sound: Build) -> None:
    folder = build_sound("clap")
    # Longer ones are cut at random by transformers.
    short = [each for each, seconds in zip(RECORDINGS, SECONDS, strict=True) if seconds <= 2]
    model = load("audio_embedding", folder, normalize=False)
    found = run(model, [*short, *({"text": text} for text in TEXTS)])
    of: Any = transformers
    theirs = of.AutoModel.from_pretrained(folder)
    extractor = of.AutoFeatureExtractor.from_pretrained(folder)
    tokenizer = of.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        expected = []
        for recording in short:
            samples = decode_audio(recording, RATE, 60)
            inputs = extractor(samples, sampling_rate=RATE, return_tensors="pt")
            expected.append(theirs.get_audio_features(**inputs).pooler_output[0])
        for text in TEXTS:
            inputs = tokenizer(text, return_tensors="pt")
            expected.append(theirs.get_text_features(**inputs).pooler_output[0])
    for result, vector in zip(found, expected, strict=True):
        Embedding.model_validate(result)
        np.testing.assert_allclose(result["vector"], vector, rtol=1e-4, atol=1e-5)


def test_sound_that_is_longer_than_the_model_hears_has_one_vector(
    load: Load, build_sound: Build
) -> None:
    model = load("audio_embedding", build_sound("clap"))
    first, second = run(model, [RECORDINGS[4]] * 2, encoding="base64")
    assert first == second
    assert np.linalg.norm(to_numpy(first)) == pytest.approx(1, abs=1e-5)


def test_longer_sounds_take_more_of_the_token_budget(load: Load, build_sound: Build) -> None:
    model = load("audio_classification", build_sound("labels"))
    prepared = model.preprocess(RECORDINGS)
    assert [model.tokens(each) for each in prepared] == [25, 85, 100, 45, 170, 85]


def test_bad_item_fails_alone(load: Load, build_sound: Build) -> None:
    model = load("audio_classification", build_sound("labels"))
    good, *failed = run(model, [RECORDINGS[0], b"no sound", {"text": "a dog"}, ""])
    assert good["label"] in LABELS.values()
    for each in failed:
        assert isinstance(each, Failed)
        assert isinstance(each.exception, InvalidItem)


def test_model_of_another_kind_is_refused(load: Load, build_sound: Build) -> None:
    with pytest.raises(ModelLoadError, match="has no sound and texts in one space"):
        load("audio_embedding", build_sound("labels"))
    with pytest.raises(ModelLoadError, match="a clap model is none of the kind"):
        load("audio_classification", build_sound("clap"))
    with pytest.raises(ModelLoadError, match="no trained classification head"):
        load("audio_classification", build_sound("wav2vec2"))
