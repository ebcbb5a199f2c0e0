"""Tiny models of pictures, saved once per session."""

from functools import cache
from pathlib import Path

import pytest

from support.pictures import BuildVision, save_vision_model


@pytest.fixture(scope="session")
def build_vision(tmp_path_factory: pytest.TempPathFactory) -> BuildVision:
    @cache
    def saved(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        save_vision_model(folder, architecture)
        return folder

    return saved
