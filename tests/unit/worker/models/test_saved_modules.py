"""Embeddings: what the files of sentence-transformers say holds, or the model is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from batchery.errors import ModelLoadError
from support.tiny_models import CORPUS, Build, Copy, Load, mend, run, write_json

#: Greatest difference of any number of a unit vector in fp32: the sums run in another order.
TOLERANCE = 5e-6

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]

#: Texts that reach every limit: no word, one token, large letters, accents, other scripts, length.
TEXTS = [" ", "rain", "THE Cat sat", "naïve 数字 кот", " ".join(CORPUS), "cat dog " * 60]

Files = dict[str, Any]


def write_modules(folder: Path, *modules: str, width: int = 32, **pooling: Any) -> None:
    """Writes what sentence-transformers writes beside a transformer."""
    listed = [*MODULES]
    for place, kind in enumerate(modules, 2):
        name = f"{place}_{kind}"
        kind_of = f"sentence_transformers.models.{kind}"
        listed.append({"idx": place, "name": f"{place}", "path": name, "type": kind_of})
        weights = {"linear.weight": torch.randn(8, width, generator=torch.manual_seed(3)) / 6}
        config: Files = {"in_features": width, "out_features": 8, "bias": False}
        if kind == "LayerNorm":
            width = 8 if "Dense" in modules[: place - 2] else width
            config = {"dimension": width}
            weights = {"norm.weight": torch.ones(width) / 2, "norm.bias": torch.ones(width)}
        if kind != "Normalize":
            write_json(folder, f"{name}/config.json", config)
            save_file(weights, folder / name / "model.safetensors")
    write_json(folder, "modules.json", listed)
    pooling = {"pooling_mode": "mean", **pooling}
    write_json(folder, "1_Pooling/config.json", {"embedding_dimension": 32, **pooling})


def assert_is_the_librarys(
    folder: Path, model: Any, texts: list[str], prompt: str | None = None
) -> None:
    """Compares with `encode`, text by text: padding is none of the model's numbers."""
    prompts, options = dict(model.settings.prompts), {"dtype": torch.float32}
    library = mend(
        SentenceTransformer(str(folder), device="cpu", prompts=prompts, model_kwargs=options)
    )
    keywords = {"prompt": prompt} if prompt else {}
    expected = library.encode(
        texts, batch_size=1, prompt_name=prompt, normalize_embeddings=True, task=prompt
    )
    found = [each["vector"] for each in run(model, texts, **keywords)]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.fixture
def folder(build: Build, copied: Copy) -> Path:
    return copied(build("bert"))


@pytest.mark.parametrize(
    "files",
    [
        {"sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True}},
        {"sentence_roberta_config.json": {"max_seq_length": 12, "do_lower_case": True}},
        {"sentence_xlnet_config.json": {"max_seq_length": 12}},
        {"tokenizer_config.json": 16, "sentence_bert_config.json": {"max_seq_length": 48}},
        {"tokenizer_config.json": 16},
        *(
            {"sentence_bert_config.json": {"max_seq_length": 12, name: {"truncation_side": "left"}}}
            for name in ("tokenizer_args", "processor_kwargs")
        ),
        {"sentence_bert_config.json": {"processing_kwargs": {"text": {"max_length": 9}}}},
        {"sentence_bert_config.json": {"model_args": {"dtype": "float16"}}},
        {"config_sentence_transformers.json": {"truncate_dim": 8}},
        {
            "config_sentence_transformers.json": {
                "prompts": {"rain": "rain falls "},
                "default_prompt_name": "rain",
            }
        },
        {"1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}},
    ],
    ids=str,
)
def test_the_files_say_what_the_numbers_are(files: Files, folder: Path, embedder: Load) -> None:
    write_modules(folder)
    for name, content in files.items():
        if name == "tokenizer_config.json":
            known = json.loads((folder / name).read_text())
            content = {**known, "model_max_length": content}
        write_json(folder, name, content)
    assert_is_the_librarys(folder, embedder(folder), TEXTS)


#: What of the models below differs.
DRAWN: dict[str, Any] = {
    "architecture": ["bert", "roberta", "distilbert", "mpnet", "modernbert", "gpt2-left", "t5"],
    "pooling": [
        *("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"),
        *(["mean", "max"], ["cls", "lasttoken", "weightedmean"]),
    ],
    "modules": [(), ("Dense",), ("LayerNorm",), ("Dense", "LayerNorm"), ("Dense", "Normalize")],
    "prompt": [None, "query", "rain"],
    "include_prompt": [True, False],
    "max_seq_length": [None, 12],
    "forward": ["auto", "padded"],
}


# To find a smaller example would take minutes.
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(drawn=st.fixed_dictionaries({key: st.sampled_from(DRAWN[key]) for key in DRAWN}))
def test_any_combination_gives_the_numbers_of_the_library(
    drawn: dict[str, Any],
    build: Build,
    embedder: Load,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("drawn") / "it"
    shutil.copytree(build(drawn["architecture"]), folder)
    width = 32 * (1 if isinstance(drawn["pooling"], str) else len(drawn["pooling"]))
    write_modules(
        folder,
        *drawn["modules"],
        width=width,
        pooling_mode=drawn["pooling"],
        include_prompt=drawn["include_prompt"],
    )
    if drawn["max_seq_length"]:
        write_json(folder, "sentence_bert_config.json", {"max_seq_length": 12})
    prompts = {"query": "the cat ", "rain": "rain falls on "}
    model = embedder(folder, prompts=prompts, forward=drawn["forward"])
    texts = TEXTS if drawn["architecture"] != "gpt2-left" else TEXTS[1:]
    assert_is_the_librarys(folder, model, texts, drawn["prompt"])


def test_a_transformer_in_a_folder_of_its_own(build: Build, tmp_path: Path, embedder: Load) -> None:
    plain = SentenceTransformer(str(build("bert")), device="cpu")
    plain.save(str(tmp_path / "model"))
    folder = tmp_path / "model"
    own = folder / "0_Transformer"
    own.mkdir()
    for path in [*folder.iterdir()]:
        if path.is_file() and path.name not in (
            "modules.json",
            "config_sentence_transformers.json",
        ):
            path.rename(own / path.name)
    listed = json.loads((folder / "modules.json").read_text())
    write_json(folder, "modules.json", [{**listed[0], "path": "0_Transformer"}, *listed[1:]])
    assert_is_the_librarys(folder, embedder(folder), TEXTS)


def test_each_route_of_a_router_is_taken(build: Build, tmp_path: Path, embedder: Load) -> None:
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    routes = {
        "query": [Transformer(str(build("bert"))), Pooling(32, "cls")],
        "document": [Transformer(str(build("roberta"))), Pooling(32, "mean")],
    }
    router = Router(routes, default_route="document")
    SentenceTransformer(modules=[router], device="cpu").save(str(tmp_path))
    model = embedder(tmp_path)
    for prompt in (None, "query", "document"):
        assert_is_the_librarys(tmp_path, model, TEXTS[:-1], prompt)
    assert run(model, TEXTS[-1:])[0]["truncated"] is True


def test_a_rotary_model_may_have_a_limit_above_the_positions_of_its_config(
    build: Build, copied: Copy, embedder: Load, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(build("modernbert"))
    write_modules(folder)
    write_json(folder, "sentence_bert_config.json", {"max_seq_length": 120})
    model = embedder(folder)
    assert run(model, ["cat dog " * 60])[0]["tokens"] == 120
    assert_is_the_librarys(folder, model, TEXTS)
    assert embedder(folder, max_length=90).max_length == 90
    assert "max_length = 90 is more than the 80 tokens that its config names" in caplog.text


def test_settings_outrank_the_files(folder: Path, embedder: Load) -> None:
    write_modules(folder, pooling_mode="lasttoken")
    own = {"prompts": {"query": "query: "}, "default_prompt_name": "query", "truncate_dim": 8}
    write_json(folder, "config_sentence_transformers.json", own)
    model = embedder(folder)
    assert (model.prompts["query"], model.default_prompt) == ("query: ", "query")
    changed = {"prompts": {"query": "find: "}, "default_prompt": "document", "dimensions": 20}
    model = embedder(folder, pooling="cls", **changed)
    assert (model.prompts["query"], model.default_prompt) == ("find: ", "document")
    (found,) = run(model, ["the cat"])
    write_modules(folder, pooling_mode="cls")
    assert run(embedder(folder, dimensions=20, default_prompt="document"), ["the cat"]) == [found]


def test_own_code_of_the_library_takes_texts_alone_and_says_why_it_is_slower(
    folder: Path, embedder: Load, caplog: pytest.LogCaptureFixture
) -> None:
    write_modules(folder, include_prompt=False)
    with caplog.at_level("INFO"):
        model = embedder(folder, prompts={"query": "rain falls "})
    assert "since sentence-transformers' own code runs for prompt 'query': its re" in caplog.text
    (failed,) = run(model, [[5, 6]], prompt="query")
    assert "this model takes texts alone with this prompt" in str(failed.exception)
    assert run(model, [[5, 6]])[0]["tokens"] == 4
    (cut,) = run(model, ["cat " * 100], prompt="query")
    assert (cut["tokens"], cut["truncated"]) == (80, True)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"sentence_bert_config.json": {"something_new": 3}}, "Transformer.* 'something_new'"),
        ({"1_Pooling/config.json": {"embedding_dimension": 32, "new": 3}}, "Pooling.* 'new'"),
        ({"1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "odd"}}, "'odd'"),
        ({"modules.json": [{**MODULES[0], "type": "custom_st.Transformer"}]}, "custom_st"),
        ({"modules.json": [{**MODULES[1], "path": "../other"}]}, "../other"),
        ({"config_sentence_transformers.json": {"requirements": {"torch": ">=99"}}}, "torch"),
        ({"adapter_config.json": {"peft_type": "LORA"}}, "merge it into the weights"),
    ],
    ids=str,
)
def test_what_is_not_known_is_refused_by_name(
    files: Files, problem: str, folder: Path, embedder: Load
) -> None:
    write_modules(folder)
    for name, content in files.items():
        write_json(folder, name, content)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        embedder(folder)
    assert "\n" not in str(caught.value)


def test_pickles_of_modules_are_refused(folder: Path, embedder: Load) -> None:
    write_modules(folder, "Dense")
    embedder(folder)
    (folder / "2_Dense/model.safetensors").unlink()
    torch.save({"linear.weight": torch.ones(8, 32)}, folder / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="a module has no weights in safetensors"):
        embedder(folder)
