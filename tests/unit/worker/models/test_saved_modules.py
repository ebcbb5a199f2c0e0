"""What sentence-transformers wrote beside a model is followed, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from batchery.errors import ModelLoadError
from support.tiny_models import Build, Copy, Load

MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.fixture
def folder(build: Build, copied: Copy) -> Path:
    return copied(build("bert"))


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_is_read_in_its_old_and_its_new_spelling(
    config: dict[str, Any], pooling: str, folder: Path, embedder: Load
) -> None:
    write(folder, "modules.json", MODULES)
    write(folder, "1_Pooling/config.json", config)
    assert embedder(folder).reading == pooling


def test_the_setting_outranks_the_files(folder: Path, embedder: Load) -> None:
    write(folder, "1_Pooling/config.json", {"pooling_mode": "max"})
    assert embedder(folder, pooling="cls").reading == "cls"


def test_the_pooling_module_may_be_in_another_folder(folder: Path, embedder: Load) -> None:
    write(folder, "modules.json", [{**MODULES[1], "path": "pool"}])
    write(folder, "pool/config.json", {"pooling_mode": "cls"})
    assert embedder(folder).reading == "cls"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pooling_mode_max_tokens": True}, "its pooling is max"),
        ({"pooling_mode": ["mean", "max"]}, "its pooling is mean and max"),
        ({}, "its pooling is none"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves the prompt out"),
    ],
)
def test_a_pooling_that_is_not_built_in_is_refused(
    config: dict[str, Any], message: str, folder: Path, embedder: Load
) -> None:
    write(folder, "1_Pooling/config.json", config)
    with pytest.raises(ModelLoadError, match=message):
        embedder(folder)


def test_a_module_that_would_change_the_vectors_is_not_left_out_silently(
    folder: Path, embedder: Load
) -> None:
    dense = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    write(folder, "modules.json", [*MODULES, dense])
    with pytest.raises(ModelLoadError, match=r"modules\.json asks for Dense"):
        embedder(folder)


def test_the_models_own_prompts_are_there_and_settings_win(folder: Path, embedder: Load) -> None:
    own = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
    write(folder, "config_sentence_transformers.json", own)
    model = embedder(folder)
    assert (model.prompts, model.default_prompt) == ({"query": "query: ", "document": ""}, "query")
    changed = embedder(folder, prompts={"query": "find: "}, default_prompt="document")
    assert changed.prompts["query"] == "find: "
    assert changed.default_prompt == "document"


def test_the_limit_of_the_files_holds_but_never_exceeds_the_positions(
    folder: Path, embedder: Load
) -> None:
    write(folder, "sentence_bert_config.json", {"max_seq_length": 40})
    assert embedder(folder).max_length == 40
    write(folder, "sentence_bert_config.json", {"max_seq_length": 4000})
    assert embedder(folder).max_length == 80
    write(folder, "sentence_bert_config.json", {"max_seq_length": None})
    assert embedder(folder).max_length == 80


def test_a_file_that_is_not_json_is_named(folder: Path, embedder: Load) -> None:
    (folder / "modules.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"modules\.json is not JSON"):
        embedder(folder)
