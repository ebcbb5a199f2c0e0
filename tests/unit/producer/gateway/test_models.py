"""What the gateway reads of a model once, in a thread: files, vectors."""

import base64
from pathlib import Path

import numpy as np
import pytest

from batchery.settings import ModelSettings
from batchery_producer.gateway.models import (
    ServedModel,
    numbers,
    read_file,
    read_prompts,
    shorten,
)
from batchery_producer.gateway.problems import Problem


def served(folder: Path) -> ServedModel:
    return ServedModel("m", ModelSettings(kind="classification", model=str(folder)))


def test_missing_file_is_empty_and_a_broken_one_is_named(tmp_path: Path) -> None:
    assert read_file(served(tmp_path), "config.json") == {}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Problem, match=r"model 'm': the gateway cannot read config\.json"):
        read_file(served(tmp_path), "config.json")


def test_prompts_of_files_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": "q: "}}')
    # The library reads that one only beside this one.
    assert read_prompts(served(tmp_path)) == {}
    (tmp_path / "modules.json").write_text('[{"path": ""}]')
    assert read_prompts(served(tmp_path)) == {"query": "q: "}


def spelled(*values: float) -> str:
    return base64.b64encode(np.array(values, dtype="<f4").tobytes()).decode("ascii")


@pytest.mark.parametrize(
    ("vector", "scale", "kept"),
    [((3, 4, 12), False, [3, 4]), ((3, 4, 12), True, [0.6, 0.8]), ((0, 0, 1), True, [0, 0])],
)
def test_the_leading_dimensions_are_kept(
    vector: tuple[float, ...], kept: list[float], *, scale: bool
) -> None:
    assert numbers(shorten(spelled(*vector), 2, scale=scale)) == pytest.approx(kept)


def test_a_vector_with_fewer_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match="dimensions = 4"):
        shorten(spelled(1, 2, 3), 4, scale=True)
