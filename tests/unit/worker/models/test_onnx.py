"""Engine onnx: the results of torch, and one line for each file that does not suit."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from batchery.errors import ModelLoadError, SettingsError
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.installer import KINDS
from batchery.model_settings import ENGINE_KINDS
from batchery.settings import ModelSettings, Settings
from batchery_worker.device_pool.weights import estimate_bytes
from batchery_worker.models.onnx_session import OnnxSession
from batchery_worker.models.source import ModelSource
from benchmarks.engine.onnx_file import export_onnx
from support.tiny_models import Build, Copy, Load, run

#: Greatest difference of any number in fp32, for numbers up to 1: the sums run in another order.
TOLERANCE = 5e-6

OTHER_KIND = "it is for embedding, classification, rerank alone; leave engine out for others"

LABELS = ("animal", "weather", "trade")


#: Makes the file of a saved model, once per module: `exported("bert")`.
Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(build: Build) -> Exported:
    @cache
    def made(architecture: str, labels: tuple[str, ...] = ()) -> Path:
        # One layer is exported in half the time.
        folder = build(architecture, labels, num_hidden_layers=1)
        export_onnx(folder, "SequenceClassification" if labels else "")
        return folder

    return made


def test_vectors_are_those_of_torch_in_any_batch(
    exported: Exported, embedder: Load, texts: list[str]
) -> None:
    folder = exported("bert")
    texts = [*texts, "cat " * 100]
    expected = _vectors(embedder(folder), texts)
    model = embedder(folder, engine="onnx")
    assert model.pads
    assert model.why_padded == "since ONNX Runtime pads"
    np.testing.assert_allclose(_vectors(model, texts), expected, atol=TOLERANCE)
    alone = [_vectors(model, [text])[0] for text in texts]
    np.testing.assert_allclose(alone, expected, atol=TOLERANCE)


def test_scores_are_those_of_torch(exported: Exported, classifier: Load, texts: list[str]) -> None:
    folder = exported("bert", LABELS)
    items = [*texts, *({"text": "the cat", "text_pair": text} for text in texts[:3])]
    expected, found = (
        run(classifier(folder, engine=engine), items, top_k=3)
        for engine in ("transformers", "onnx")
    )
    assert [each["label"] for each in found] == [each["label"] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one["scores"] == pytest.approx(other["scores"], abs=TOLERANCE)


def test_a_quantized_file_gives_other_vectors_under_another_identity(
    exported: Exported, copied: Copy, embedder: Load, texts: list[str]
) -> None:
    from onnxruntime.quantization import quantize_dynamic

    folder = copied(exported("bert"))
    source, target = (folder / "onnx" / name for name in ("model.onnx", "model_qint8.onnx"))
    quantize_dynamic(source, target, per_channel=True)
    whole = embedder(folder, engine="onnx")
    small = embedder(folder, engine="onnx", onnx_file="onnx/model_qint8.onnx")
    cosines = (np.array(_vectors(small, texts)) * _vectors(whole, texts)).sum(axis=1)
    assert ((cosines > 0.9) & (cosines < 0.99999)).all()
    assert small.identity() != whole.identity()


def test_memory_and_version_are_those_of_the_file(
    exported: Exported, copied: Copy, embedder: Load
) -> None:
    folder = copied(exported("bert"))
    files = sorted((folder / "onnx").iterdir())
    model = embedder(folder, engine="onnx")
    assert model.memory_bytes == sum(path.stat().st_size for path in files)
    # The same before it is loaded, and without safetensors.
    (folder / "model.safetensors").unlink()
    assert estimate_bytes(model.settings, "cpu") == model.memory_bytes
    first = embedder(folder, engine="onnx").version()
    assert embedder(folder, engine="onnx").version() == first
    os.utime(files[0], (1, 1))
    assert embedder(folder, engine="onnx").version() != first
    other = model.settings.model_copy(update={"onnx_file": "none.onnx"})
    assert estimate_bytes(other, "cpu") is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        *(
            ({"kind": kind}, f"engine = 'onnx' (from {{}}): {OTHER_KIND}")
            for kind in KINDS
            if kind not in ENGINE_KINDS["onnx"]
        ),
        ({"engine": "vllm"}, "engine = 'vllm' (from {}): it is for generation alone; leave engine"),
        ({"dtype": "bf16"}, "engine = 'onnx' (from {}): it takes dtype = auto alone: the file has"),
        ({"forward": "packed"}, "engine = 'onnx' (from {}): it takes forward = auto or padded"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], problem: str) -> None:
    model = {"kind": "embedding", "model": "a/b", "engine": "onnx", **settings}
    with pytest.raises(SettingsError) as caught:
        Settings.load(models={"it": model})
    assert str(caught.value).startswith(
        f"setting models.it.{problem.format('a keyword of install()')}"
    )


def _int(name: str, *shape: Any) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)


IDS, MASK = _int("input_ids", "b", "l"), _int("attention_mask", "b", "l")


def save_graph(
    folder: Path,
    *inputs: Any,
    output: str = "last_hidden_state",
    width: int = 32,
    name: str = "model.onnx",
) -> None:
    """A file that repeats each token's id as its vector."""
    numbers = [[1, 1, width], [2]]
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "axes"], ["columns"]),
        helper.make_node("Expand", ["columns", "repeats"], [output]),
    ]
    constants = [
        helper.make_tensor(name, TensorProto.INT64, [len(each)], each)
        for name, each in zip(("repeats", "axes"), numbers, strict=True)
    ]
    values = helper.make_tensor_value_info(output, TensorProto.FLOAT, ("b", "l", width))
    graph = helper.make_graph(nodes, "test", inputs, [values], constants)
    versions = [helper.make_opsetid("", 17)]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=versions, ir_version=8), path)


@pytest.mark.parametrize(
    ("inputs", "options", "problem"),
    [
        ([IDS], {}, "takes input_ids, and no attention_mask; export it with inputs of these names"),
        ([IDS, MASK, _int("position_ids", "b", "l")], {}, "'position_ids'"),
        ([IDS, _int("attention_mask", "b", 128)], {}, "invalid dimensions for input: attention_m"),
        ([IDS, MASK], {"output": "pooled"}, "model.onnx gives pooled, not last_hidden_state; exp"),
        ([IDS, MASK], {"width": 10**12}, "Failed to allocate memory"),
    ],
)
def test_a_file_that_does_not_suit_is_refused(
    build: Build,
    copied: Copy,
    embedder: Load,
    inputs: Sequence[Any],
    options: dict[str, Any],
    problem: str,
) -> None:
    folder = copied(build("bert"))
    save_graph(folder, *inputs, **options)
    assert problem in _refusal(embedder, folder)


def test_a_file_that_is_missing_or_damaged_is_named(
    build: Build, copied: Copy, embedder: Load
) -> None:
    folder = copied(build("bert"))
    assert "there is no onnx/model.onnx and no model.onnx; set onnx_f" in _refusal(embedder, folder)
    assert "there is no other.onnx;" in _refusal(embedder, folder, onnx_file="other.onnx")
    (folder / "model.onnx").write_bytes(b"no graph")
    assert "model.onnx failed:" in _refusal(embedder, folder)


def test_a_file_for_shorter_texts_is_refused_until_max_length_says_so(
    exported: Exported, copied: Copy, embedder: Load
) -> None:
    folder = copied(exported("bert"))
    config = folder / "config.json"
    known = json.loads(config.read_text())
    config.write_text(json.dumps({**known, "max_position_embeddings": 300}))
    problem = "model.onnx cannot compute a text of 300 tokens; set max_length to what it was"
    assert problem in _refusal(embedder, folder)
    assert embedder(folder, engine="onnx", max_length=80).max_length == 80
    # Shorter ones are no problem.
    config.write_text(json.dumps({**known, "max_position_embeddings": 40}))
    (long,) = run(embedder(folder, engine="onnx"), ["cat " * 100])
    assert (long["tokens"], long["truncated"]) == (40, True)


def test_a_folder_needs_no_other_weights(build: Build, copied: Copy, embedder: Load) -> None:
    folder = copied(build("bert"))
    (folder / "model.safetensors").unlink()
    save_graph(folder, IDS, MASK)
    assert embedder(folder, engine="onnx").dimensions == 32


def test_a_missing_package_is_named(
    build: Build, copied: Copy, embedder: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(build("bert"))
    save_graph(folder, IDS, MASK)
    settings = ModelSettings(kind="embedding", model=str(folder), engine="onnx")
    with pytest.raises(ValueError, match=r"runs on cpu, not on mps$"):
        _session(settings, "mps")
    monkeypatch.setattr("batchery_worker.models.onnx_session.find_spec", lambda _: None)
    assert _refusal(embedder, folder).endswith("needs: pip install 'batchery[onnx]'")


def test_lack_of_memory_is_known_as_such(build: Build, copied: Copy) -> None:
    folder = copied(build("bert"))
    save_graph(folder, IDS, MASK, width=10**9)
    session = _session(ModelSettings(kind="embedding", model=str(folder), engine="onnx"))
    ids = torch.ones(100, 100, dtype=torch.int64)
    with pytest.raises(RuntimeError) as caught:
        session(input_ids=ids, attention_mask=ids)
    assert is_out_of_memory(caught.value)


def _session(settings: ModelSettings, device: str = "cpu") -> OnnxSession:
    return OnnxSession(ModelSource(settings), None, "last_hidden_state", torch.device(device), 1)


def _vectors(model: Any, texts: Sequence[str]) -> list[list[float]]:
    return [result["vector"] for result in run(model, texts)]


def _refusal(embedder: Load, folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        embedder(folder, engine="onnx", **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message
