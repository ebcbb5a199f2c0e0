"""Tiny models that write texts, saved and loaded once per session."""

from functools import cache
from typing import Any

import pytest
import transformers
from packaging.version import Version

from support.tiny_models import Load
from support.tiny_writers import PlainWriter, save_writer

if Version(transformers.__version__) < Version("5.23"):
    # `make matrix` has older ones, whose continuous batching is another.
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def writer(load: Load, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads a tiny model and the same as transformers runs it: `writer("llama", slots=4)`."""

    @cache
    def loaded(architecture: str, **settings: Any) -> tuple[Any, PlainWriter]:
        folder = save_writer(tmp_path_factory.mktemp(architecture), architecture)
        return load("generation", folder, **settings), PlainWriter(folder)

    return loaded
