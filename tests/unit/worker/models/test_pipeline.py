"""A pipeline: layers on several parts, each of which computes another pass at the same time."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchery import Failed, ModelLoadError, ModelSettings
from batchery.execution.batch import Lookahead, compute, prepare
from batchery_worker.batching.planner import plan
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.generation.model import GenerationModel
from batchery_worker.models.split import assign_parts, find_layers
from support.patience import patient
from support.tiny_models import ARCHITECTURES, Build, Load

#: Longest wait for another pass, in seconds.
TIMEOUT_S = patient(30)

#: A token that no text of the tests has, as it is none of a text's.
UNUSED = 1

FOUR = "cpu:0+cpu:1+cpu:2+cpu:3"

#: Those with one stack of at least two layers.
STACKS = sorted(set(ARCHITECTURES) - {"bart", "t5", "bert-left", "roberta-left", "gpt2-left"})


def cut(lengths: Sequence[int]) -> list[list[int]]:
    return plan(lengths, 64, 4)


def settings_of(folder: Path, **options: Any) -> ModelSettings:
    return ModelSettings(**{"kind": "embedding", "model": str(folder), **options})


@pytest.fixture
def four(build: Build, embedder: Load) -> EmbeddingModel:
    """A BERT of four layers, one in each stage."""
    model: EmbeddingModel = embedder(build("bert", num_hidden_layers=4), FOUR, split="pipeline")
    return model


def watch(model: Any, seen: Callable[[int], None]) -> None:
    """Has each layer report its number when a pass begins there."""
    for number, layer in enumerate(model.model.encoder.layer):
        layer.register_forward_pre_hook(lambda *_, number=number: seen(number))


@pytest.mark.parametrize("architecture", STACKS)
def test_results_are_those_of_one_device_in_order(
    build: Build, embedder: Load, texts: list[str], architecture: str
) -> None:
    folder, many = build(architecture), texts * 20
    alone = embedder(folder, forward="padded", cpu_streams=1)
    beside = embedder(folder, "cpu:0+cpu:1", split="pipeline")
    assert (beside.pass_streams, beside.passes_ahead) == (2, 2)
    expected, found = (
        compute(model, prepare(model, many, {}), {}, cut)[0] for model in (alone, beside)
    )
    assert found == expected


def test_each_stage_has_one_pass_and_all_have_one_at_the_same_time(
    four: EmbeddingModel, texts: list[str]
) -> None:
    begun = [0] * 4
    inside = [0] * 4
    # The fourth pass begins, the third is in the second stage, and so on.
    meet = threading.Barrier(4, timeout=TIMEOUT_S)

    def begin(stage: int) -> None:
        begun[stage] += 1
        inside[stage] += 1
        assert inside[stage] == 1
        if begun[stage] == 4 - stage:
            meet.wait()

    def leave(stage: int, *_: Any) -> None:
        inside[stage] -= 1

    watch(four, begin)
    for stage, layer in enumerate(four.model.encoder.layer):
        layer.register_forward_hook(partial(leave, stage))
    found = compute(four, prepare(four, texts * 10, {}), {}, cut)[0]
    assert not [each for each in found if isinstance(each, Failed)]
    assert inside == [0] * 4
    assert len(set(begun)) == 1


def test_the_next_batch_begins_before_the_last_one_ends(
    four: EmbeddingModel, texts: list[str]
) -> None:
    batch, following = (prepare(four, some, {}) for some in (texts[:1], texts[1:2]))
    lookahead = Lookahead(four)
    begun = threading.Semaphore(0)
    counted: list[int] = []

    def begin(stage: int) -> None:
        if stage == 0:
            begun.release()
        if stage == 3 and not counted:
            counted.append(1)
            # Both have begun while the first is not done.
            for _ in range(2):
                assert begun.acquire(timeout=TIMEOUT_S)

    watch(four, begin)
    start_next = partial(lookahead.start, following, {})
    for items in (batch, following):
        outcomes = compute(four, items, {}, cut, lookahead=lookahead, start_next_batch=start_next)[
            0
        ]
        assert not isinstance(outcomes[0], Failed)


def test_an_item_that_fails_in_the_middle_fails_alone(
    four: EmbeddingModel, texts: list[str]
) -> None:
    many = texts * 4
    prepared = prepare(four, many, {})
    expected = compute(four, prepared, {}, cut)[0]
    poison = prepared[len(texts) + 2]
    ill = poison.copy()
    ill[0, 1] = UNUSED
    prepared[len(texts) + 2] = ill
    inputs = threading.local()

    def remember(_: Any, inputs_: Any, keywords: Any) -> None:
        inputs.ids = keywords["input_ids"]

    def begin(stage: int) -> None:
        if stage == 2 and bool((inputs.ids == UNUSED).any()):
            raise RuntimeError("the third stage is ill")

    four.model.register_forward_pre_hook(remember, with_kwargs=True)
    watch(four, begin)
    for _ in range(3):
        found = compute(four, prepared, {}, cut)[0]
        failed = found[len(texts) + 2]
        assert isinstance(failed, Failed)
        assert "the third stage is ill" in str(failed.error)
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            if place != len(texts) + 2:
                assert one["vector"] == pytest.approx(other["vector"], abs=1e-5)


def test_a_stage_without_memory_halves_its_pass_and_no_other(
    four: EmbeddingModel, texts: list[str]
) -> None:
    failed: list[int] = []
    passed: list[int] = []
    memory = SimpleNamespace(failed=failed.append, passed=passed.append)
    prepared = prepare(four, texts * 4, {})
    expected = compute(four, prepared, {}, cut)[0]

    def check(_: Any, inputs: Any) -> None:
        if len(inputs[0]) > 2:
            raise MemoryError

    four.model.encoder.layer[3].register_forward_pre_hook(check)
    found = compute(four, prepared, {}, cut, memory=memory)[0]
    assert failed
    assert passed
    for one, other in zip(found, expected, strict=True):
        assert one["vector"] == pytest.approx(other["vector"], abs=1e-5)


def test_layers_are_shared_by_their_weights() -> None:
    def layer(width: int) -> torch.nn.Module:
        return torch.nn.Linear(1, width, bias=False)

    model = torch.nn.Module()
    model.embeddings = torch.nn.Embedding(1000, 1)
    model.layers = torch.nn.ModuleList([layer(each) for each in (2, 2, 2, 6, 6, 6)])
    model.positions = torch.nn.Dropout()
    model.head = layer(1000)
    parts = {name: part for name, part, _ in assign_parts(model, find_layers(model), 2)}
    assert parts == {
        "embeddings": 0,
        **{f"layers.{number}": int(number > 3) for number in range(6)},
        "positions": 0,
        "head": 1,
    }


@pytest.mark.parametrize(
    ("architecture", "device", "options", "problem"),
    [
        ("bert", "cpu+disk", {}, r"stay on cards, not for cpu\+disk; set split = 'layers'"),
        ("bert", FOUR, {}, "is 4 parts, and a bert has 2 layers"),
        ("bart", "cpu:0+cpu:1", {}, "a bart has two; set split = 'layers'"),
        ("bert", "cpu:0+cpu:1", {"layer_memory_bytes": 9}, r"0.00 of 0.00 GiB on cpu:0.*\+cpu"),
    ],
)
def test_what_has_no_pipeline_is_refused_by_name(
    build: Build,
    embedder: Load,
    architecture: str,
    device: str,
    options: dict[str, Any],
    problem: str,
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        embedder(build(architecture), device, split="pipeline", **options)


def test_texts_are_not_written_in_a_pipeline(build: Build) -> None:
    settings = settings_of(build("llama"), kind="generation", split="pipeline")
    with pytest.raises(ModelLoadError, match="one token after the other; name one card"):
        GenerationModel(settings).load("cpu:0+cpu:1")
