"""A model says of itself what its results depend on, and nothing else."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchery import ModelSettings
from batchery_worker.models.source import NEUTRAL, ModelSource
from support.tiny_models import Build, Copy, Load

NEUTRAL_SETTINGS: dict[str, Any] = {
    "queue": "another",
    "max_batch_size": 3,
    "max_batch_tokens": 64,
    "max_wait_ms": 5,
    "target_latency_ms": 100,
    "cache": True,
    "cache_ttl_s": 60,
    "devices": ["cpu"],
    "pinned": True,
    "feeders": 2,
}

#: Each gives at least some texts another result.
TELLING_SETTINGS: list[dict[str, Any]] = [
    {"dtype": "bf16"},
    {"forward": "padded"},
    {"max_length": 8},
    {"overflow": "refuse"},
    {"max_chars": 100},
    {"pooling": "cls"},
    {"normalize": False},
    {"dimensions": 8},
    {"prompts": {"query": "query: "}},
    {"prompts": {"query": "query: "}, "default_prompt": "query"},
]


def test_a_copy_with_other_limits_is_the_same_model(
    build: Build, embedder: Load, copied: Copy
) -> None:
    folder = build("bert")
    first = embedder(folder).identity()
    assert first == embedder(copied(folder), **NEUTRAL_SETTINGS).identity()
    assert set(NEUTRAL_SETTINGS) | {"model", "revision"} == NEUTRAL


def test_every_setting_that_changes_results_makes_another_model(
    build: Build, embedder: Load
) -> None:
    folder = build("bert")
    identities = [embedder(folder, **each).identity() for each in ({}, *TELLING_SETTINGS)]
    assert len(set(identities)) == len(identities)


def test_one_bit_of_the_weights_makes_another_model(
    build: Build, embedder: Load, copied: Copy
) -> None:
    folder = copied(build("bert"))
    before = embedder(folder).identity()
    (weights,) = folder.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    # Of the last number, the least significant one.
    content[-4] ^= 1
    weights.write_bytes(content)
    assert embedder(folder).identity() != before


def test_a_model_of_the_hub_is_known_by_its_commit(
    build: Build, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = embedder(build("bert"))
    model._source.folder = None
    model._source.name = "acme/bert"
    commits = []
    for commit in ("a" * 40, "b" * 40):
        monkeypatch.setattr(model.model.config, "_commit_hash", commit, raising=False)
        assert f"acme/bert@{commit}" in model.identity()
        commits.append(model.identity())
    assert len(set(commits)) == 2


def test_a_version_changes_with_files_and_options_and_with_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    os.utime(folder / "config.json", (1, 1))

    def version(**options: Any) -> str:
        settings = ModelSettings(kind="embedding", model=str(folder), **options)
        return ModelSource(settings).version()

    first = version()
    assert len(first) == 12
    assert version(queue="q", cache=True, max_batch_size=3) == first
    (folder / ".hidden").write_text("x")
    (folder / "pytorch_model.bin").write_text("x")
    assert version() == first
    assert len({first, version(dtype="bf16"), version(revision="other")}) == 3
    os.utime(folder / "config.json", (2, 2))
    assert version() != first
