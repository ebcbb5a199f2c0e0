"""Layers on several parts of a device, and what is refused before weights are loaded."""

import signal
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from batchery import ModelLoadError, ModelSettings
from batchery_worker.device.functions import soft_time_limit
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.generation.model import GenerationModel
from batchery_worker.models.split import undisturbed
from support.tiny_models import CORPUS, Build, run
from support.tiny_writers import Driver, PlainWriter, make_prompts, save_writer

#: Bytes of layers that stay in main memory: less than the tiny models have.
LITTLE = 60_000

TEXTS = [*CORPUS, "a dog", "tea", *CORPUS[::-1]]


def settings_of(folder: Path, kind: Any = "embedding", **options: Any) -> ModelSettings:
    return ModelSettings(kind=kind, model=str(folder), **options)


def vectors(settings: ModelSettings, device: str) -> Any:
    model = EmbeddingModel(settings)
    model.load(device)
    return model, [result["vector"] for result in run(model, TEXTS)]


@pytest.mark.parametrize("architecture", ["llama", "bert", "gpt2"])
def test_layers_that_stay_in_files_make_the_same_vectors(build: Build, architecture: str) -> None:
    settings = settings_of(build(architecture), layer_memory_bytes=LITTLE)
    model, found = vectors(settings, "cpu+disk")
    assert "disk" in model.model.hf_device_map.values()
    _, plain = vectors(settings, "cpu")
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_texts_are_written_with_layers_that_stay_in_files(tmp_path: Path) -> None:
    folder = save_writer(tmp_path)
    options = {"slots": 4, "cache_tokens": 512}
    little = settings_of(folder, "generation", layer_memory_bytes=LITTLE, **options)
    with pytest.raises(ModelLoadError, match="not even its first layer fits into cpu"):
        GenerationModel(little).load("cpu+disk")
    more = settings_of(folder, "generation", layer_memory_bytes=2 * LITTLE, **options)
    model = GenerationModel(more)
    model.load("cpu+disk")
    assert "disk" in model.model.hf_device_map.values()
    plain, prompts = PlainWriter(folder), make_prompts(6)
    jobs = ((place, prompt, {"max_new_tokens": 6}) for place, prompt in enumerate(prompts))
    written = Driver(model).run(jobs)
    for place, prompt in enumerate(prompts):
        assert written[place]["text"] == plain.text(plain.write(prompt, 6))


def test_what_does_not_fit_is_said_with_the_sums(build: Build) -> None:
    settings = settings_of(build("llama"), split="layers", layer_memory_bytes=LITTLE)
    with pytest.raises(ModelLoadError, match=r"do not fit into cpu:0\+cpu:1 \(0.00 GiB on cpu\)"):
        EmbeddingModel(settings).load("cpu:0+cpu:1")


def test_texts_are_not_written_by_layers_on_several_cards(build: Build) -> None:
    settings = settings_of(build("llama"), "generation", split="layers")
    with pytest.raises(ModelLoadError, match="name one card"):
        GenerationModel(settings).load("cuda:0+cuda:1")


def test_a_soft_time_limit_waits_for_the_end_of_a_pass() -> None:
    passes = []

    def compute() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGALRM)
            passes.append("whole")
        passes.append("next")

    with pytest.raises(SoftTimeLimitExceeded), soft_time_limit(60):
        compute()
    assert passes == ["whole"]
