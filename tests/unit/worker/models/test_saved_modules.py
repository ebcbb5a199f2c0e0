"""What sentence-transformers wrote beside a model is followed, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from batchery.errors import ModelLoadError
from support.tiny_models import Build, Copy, Load, run

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


@pytest.mark.parametrize("mode", ["max", "mean_sqrt_len_tokens", "weightedmean"])
@pytest.mark.parametrize("architecture", ["bert", "gpt2-left"])
def test_other_poolings_are_those_of_their_definition(
    mode: str, architecture: str, build: Build, copied: Copy, embedder: Load, texts: list[str]
) -> None:
    folder = copied(build(architecture))
    write(folder, "modules.json", MODULES)
    write(folder, "1_Pooling/config.json", {"pooling_mode": mode})
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    for forward in ("packed", "padded"):
        results = run(embedder(folder, forward=forward), texts, normalize=False)
        for text, result in zip(texts, results, strict=True):
            with torch.no_grad():
                rows = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0]
            places = torch.arange(1.0, len(rows) + 1)[:, None]
            expected = {
                "max": rows.amax(dim=0),
                "mean_sqrt_len_tokens": rows.sum(dim=0) / len(rows) ** 0.5,
                "weightedmean": (rows * places).sum(dim=0) / places.sum(),
            }[mode]
            assert result["vector"] == pytest.approx(expected.tolist(), abs=2e-5)


def test_the_setting_outranks_the_files(folder: Path, embedder: Load) -> None:
    write(folder, "1_Pooling/config.json", {"pooling_mode": "last of all"})
    assert embedder(folder, pooling="cls").reading == "cls"


def test_the_pooling_module_may_be_in_another_folder(folder: Path, embedder: Load) -> None:
    write(folder, "modules.json", [{**MODULES[1], "path": "pool"}])
    write(folder, "pool/config.json", {"pooling_mode": "cls"})
    assert embedder(folder).reading == "cls"


@pytest.mark.parametrize(
    ("config", "message"),
    [
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
    norm = {"idx": 2, "path": "2_LayerNorm", "type": "sentence_transformers.models.LayerNorm"}
    write(folder, "modules.json", [*MODULES, norm])
    with pytest.raises(ModelLoadError, match=r"modules\.json asks for LayerNorm"):
        embedder(folder)


@pytest.mark.parametrize("activation", ["Identity", "Tanh"])
def test_layers_behind_the_pooling_are_part_of_the_model(
    activation: str, folder: Path, embedder: Load
) -> None:
    (plain,) = run(embedder(folder), ["the cat"], normalize=False)
    weight = torch.randn(8, 32, generator=torch.manual_seed(3)) / 6
    dense = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    write(folder, "2_Dense/config.json", {"activation_function": f"torch.nn.{activation}"})
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    write(folder, "modules.json", [*MODULES, dense])
    projected = torch.tensor(plain["vector"]) @ weight.T
    expected = projected.tanh() if activation == "Tanh" else projected
    (found,) = run(embedder(folder), ["the cat"], normalize=False)
    assert found["vector"] == pytest.approx(expected.tolist(), abs=5e-6)
    assert len(run(embedder(folder, pooling="mean"), ["the cat"])[0]["vector"]) == 32
    write(folder, "modules.json", [MODULES[0], dense, MODULES[1]])
    with pytest.raises(ModelLoadError, match="has the order Transformer, Dense, Pooling"):
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


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_limit_and_small_letters_are_read_by_the_old_names_too(
    name: str, folder: Path, embedder: Load, load: Load
) -> None:
    write(folder, "modules.json", MODULES)
    write(folder, name, {"max_seq_length": 12, "do_lower_case": True})
    for model in (embedder(folder), load("multi_vector_embedding", folder)):
        assert model.max_length == 12
        shouted, said = run(model, ["The CAT sat", "the cat sat"])
        assert shouted == said
        assert shouted["tokens"] == 5


def test_a_limit_outranks_that_of_the_tokenizer(folder: Path, embedder: Load) -> None:
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, "tokenizer_config.json", {**tokenizer, "model_max_length": 16})
    assert embedder(folder).max_length == 16
    write(folder, "sentence_bert_config.json", {"max_seq_length": 48})
    assert embedder(folder).max_length == 48


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_args": {"truncation_side": "left"}},
        {"processor_kwargs": {"truncation_side": "left"}},
        {"processing_kwargs": {"text": {"padding": "max_length"}}},
        {"config_args": {"is_decoder": True}},
        {"transformer_task": "text-generation"},
        {"something_new": 3},
    ],
)
def test_a_field_that_may_change_results_is_refused_by_name(
    config: dict[str, Any], folder: Path, embedder: Load
) -> None:
    write(folder, "sentence_bert_config.json", {"max_seq_length": 12, **config})
    with pytest.raises(ModelLoadError, match=f"sentence_bert_config.json has {next(iter(config))}"):
        embedder(folder)


def test_fields_that_change_nothing_do_not_matter(folder: Path, embedder: Load) -> None:
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    task = {"transformer_task": "feature-extraction", "modality_config": text}
    others = {"module_output_name": "token_embeddings", "model_args": {"torch_dtype": "float16"}}
    write(folder, "sentence_bert_config.json", {**task, **others, "tokenizer_args": {}})
    assert embedder(folder).max_length == 80


def test_vectors_are_cut_as_the_files_say(folder: Path, embedder: Load) -> None:
    (whole,) = run(embedder(folder), ["the cat"], normalize=False)
    write(folder, "config_sentence_transformers.json", {"truncate_dim": 8})
    (cut,) = run(embedder(folder), ["the cat"], normalize=False)
    assert cut["vector"] == whole["vector"][:8]
    assert len(run(embedder(folder, dimensions=20), ["the cat"])[0]["vector"]) == 20


def test_queries_and_documents_have_the_lengths_of_the_files(folder: Path, load: Load) -> None:
    lengths = {"query_length": 8, "document_length": 12}
    prefixes = {"query_prefix": "rain ", "document_prefix": "tea "}
    write(folder, "config_sentence_transformers.json", {**lengths, **prefixes})
    model = load("multi_vector_embedding", folder)
    for prompt, length in {"query": 8, "document": 12}.items():
        assert run(model, ["the cat " * 10], prompt=prompt)[0]["tokens"] == length
    assert run(model, ["the cat " * 10])[0]["tokens"] == 22


@pytest.mark.parametrize("kind", ["embedding", "multi_vector_embedding"])
def test_a_module_of_the_repositorys_own_is_refused(kind: str, folder: Path, load: Load) -> None:
    write(folder, "modules.json", [{**MODULES[0], "type": "custom_st.Transformer"}, MODULES[1]])
    with pytest.raises(ModelLoadError, match=r"asks for custom_st\.Transformer, which is no"):
        load(kind, folder)


@pytest.mark.parametrize(
    ("kind", "config", "problem"),
    [
        ("SpladePooling", {"pooling_strategy": "max", "activation_function": "relu"}, ""),
        ("SpladePooling", {"pooling_strategy": "sum"}, "has pooling_strategy = 'sum', not 'max'"),
        ("SpladePooling", {"activation_function": "log1p_relu"}, "activation_function = 'log1p_re"),
        ("Router", {}, "modules.json asks for Router"),
    ],
)
def test_sparse_models_are_splade_or_refused(
    kind: str, config: Any, problem: str, build: Build, copied: Copy, load: Load
) -> None:
    folder = copied(build("bert", head="MaskedLM"))
    pooling = {"idx": 1, "path": "1_It", "type": f"sentence_transformers.sparse_encoder.{kind}"}
    write(folder, "modules.json", [MODULES[0], pooling])
    write(folder, "1_It/config.json", {"embedding_dimension": 37, **config})
    if problem:
        with pytest.raises(ModelLoadError, match=problem):
            load("sparse_embedding", folder)
    else:
        assert run(load("sparse_embedding", folder), ["the cat"])[0]["tokens"] == 4


def test_an_adapter_beside_the_weights_is_refused(folder: Path, embedder: Load) -> None:
    write(folder, "adapter_config.json", {"peft_type": "LORA"})
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json is of an adapter"):
        embedder(folder)


def test_a_file_that_is_not_json_is_named(folder: Path, embedder: Load) -> None:
    (folder / "modules.json").write_text("[")
    with pytest.raises(ModelLoadError, match=r"modules\.json is not JSON"):
        embedder(folder)
