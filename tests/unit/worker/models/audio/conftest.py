"""Tiny models of sound, saved once per session."""

from functools import cache
from pathlib import Path

import pytest

from support.sounds import BuildSound, save_sound_model


@pytest.fixture(scope="session")
def build_sound(tmp_path_factory: pytest.TempPathFactory) -> BuildSound:
    @cache
    def saved(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        save_sound_model(folder, architecture)
        return folder

    return saved
