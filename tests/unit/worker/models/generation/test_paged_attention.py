"""The attention for GPUs over a paged cache, with a kernel of the same contract for the CPU."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchery_worker.models.forward.attention import NotPackable
from batchery_worker.models.generation import graphed_steps, paged_attention, paged_batch
from batchery_worker.models.generation.graphed_steps import GraphedSteps
from support.tiny_models import Load
from support.tiny_writers import Driver, PlainWriter, make_prompts, save_writer


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """Text by text: the queries are those of the last of its keys."""
    assert keys is not None
    assert ends.dtype == keys[0].dtype == torch.int32
    assert longest >= ends.diff().max()
    assert keys[1] >= keys[0].diff().max()
    out = torch.zeros_like(query)
    for at in range(len(ends) - 1):
        if ends[at] == ends[at + 1]:
            continue
        rows, seen = slice(*ends[at : at + 2].tolist()), slice(*keys[0][at : at + 2].tolist())
        queries, its_keys, values = (
            each.transpose(0, 1)[None] for each in (query[rows], key[seen], value[seen])
        )
        count, total = queries.shape[2], its_keys.shape[2]
        behind = torch.arange(total - count, total)[:, None] - torch.arange(total)[None]
        mask = (behind >= 0) & ((behind <= window[0]) | (window[0] < 0))
        grouped = query.shape[1] != key.shape[1]
        found = scaled_dot_product_attention(
            queries, its_keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
        out[rows] = found[0].transpose(0, 1)
    return out


def by_page(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_pages: Tensor,
    value_pages: Tensor,
    tables: Tensor,
    key_ends: Tensor,
    scale: float,
) -> Tensor:
    """Text by text, as the kernel for pages; a row without keys is padding."""
    assert tables.dtype == key_ends.dtype == torch.int32
    out = torch.zeros_like(query)
    page_tokens = key_pages.shape[1]
    for row, length in enumerate(key_ends.diff().tolist()):
        if length:
            pages = tables[row, : -(-length // page_tokens)].long()
            last = (pages[-1], (length - 1) % page_tokens)
            key_pages[last], value_pages[last] = key[row], value[row]
            keys, values = (
                each[pages].flatten(0, 1)[None, :length].transpose(1, 2)
                for each in (key_pages, value_pages)
            )
            found = scaled_dot_product_attention(
                query[row, None, :, None], keys, values, scale=scale, enable_gqa=True
            )
            out[row] = found[0, :, 0]
    return out


class CapturedSteps(GraphedSteps):
    """As on a CUDA device."""

    def __init__(self, processor: Any, texts: int) -> None:
        super().__init__(processor, texts)
        self.kinds = {True, False}
        self._pool: Any = None
        self._side: Any = None
        processor.model_runner._capture_graph = self._capture


class ReplayedSteps(CapturedSteps):
    """Computes a step of a known size from what the first one of that size was given, as a graph.

    What is not at the same place each time, or changes in the host's memory, is stale then.
    """

    def _capture(self, forward: Any, _: object, *inputs: Any) -> None:
        forward(*inputs)
        frozen = copy(inputs[1]) | {
            name: copy(each) for name, each in inputs[1].items() if isinstance(each, dict | list)
        }
        graph = SimpleNamespace(
            replay=lambda: forward(inputs[0], copy(frozen), *inputs[2:]), reset=lambda: None
        )
        self._processor.inputs_and_outputs.set_graph(graph)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "has_kernel", lambda _: True)
    monkeypatch.setattr(paged_attention, "varlen_kernel", lambda: kernel)
    monkeypatch.setattr(paged_attention, "page_kernel", lambda: None)


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt2"])
@pytest.mark.parametrize(("pages", "steps"), [(None, GraphedSteps), (by_page, ReplayedSteps)])
def test_texts_are_those_of_generate(
    architecture: str,
    pages: Any,
    steps: type[GraphedSteps],
    load: Load,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged_attention, "page_kernel", lambda: pages)
    monkeypatch.setattr(paged_batch, "GraphedSteps", steps)
    folder = save_writer(tmp_path / architecture, architecture)
    # A prompt of 12 tokens a step, and a cache for a third of the jobs.
    model = load("generation", folder, slots=6, max_batch_tokens=12, cache_tokens=224)
    # Mistral's layers have a window, and keep no pages.
    is_by_page = pages is not None and architecture != "mistral"
    wanted = paged_attention.BY_PAGE if is_by_page else paged_attention.NAME
    assert model.model.config._attn_implementation == wanted
    plain = PlainWriter(folder)
    prompts = list(dict.fromkeys(make_prompts(12)))
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 15}) for each in prompts)
    for prompt in prompts:
        assert outcomes[prompt]["text"] == plain.text(plain.write(prompt, 15))
    outputs = model._batch._processor.inputs_and_outputs
    assert outputs.attention_mask is None
    # Of texts; and of the tokens of prompts, what they read from the cache, and the longest text.
    found = {*outputs.graphs._storage}
    is_replayed = is_by_page and steps is ReplayedSteps
    assert {each for each in found if len(each) == 1} == (
        {(1,), (2,), (4,), (6,)} if is_replayed else set()
    )
    assert {each[1] > 0 for each in found if len(each) > 1} == (
        {False, True} if is_replayed else set()
    )


@pytest.mark.usefixtures("with_kernel")
def test_steps_that_cannot_be_captured_run_without_graphs(
    load: Load, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(paged_attention, "page_kernel", lambda: by_page)
    monkeypatch.setattr(paged_batch, "GraphedSteps", CapturedSteps)
    monkeypatch.setattr(graphed_steps, "capture_into", refuse)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    folder = save_writer(tmp_path / "llama")
    model = load("generation", folder)
    assert model.model.config._attn_implementation == paged_attention.BY_PAGE
    text = Driver(model).one("the cat", max_new_tokens=8)["text"]
    plain = PlainWriter(folder)
    assert text == plain.text(plain.write("the cat", 8))
    # Once for each kind of steps.
    assert sum("launched without CUDA graphs" in line for line in caplog.messages) == 2


@pytest.mark.usefixtures("with_kernel")
def test_a_kernel_that_is_wrong_is_left_alone(
    load: Load, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        return kernel(query, *rest, **options).roll(1, dims=1)

    folder = save_writer(tmp_path / "llama")
    monkeypatch.setattr(paged_attention, "varlen_kernel", lambda: shifted)
    model = load("generation", folder)
    assert model.model.config._attn_implementation == "sdpa"
    text = Driver(model).one("the cat", max_new_tokens=8)["text"]
    plain = PlainWriter(folder)
    assert text == plain.text(plain.write("the cat", 8))


def test_what_it_cannot_compute_is_refused() -> None:
    numbers = torch.ones(1, 1, 1, 8)
    with pytest.raises(NotPackable, match="softcap"):
        paged_attention.attention(
            torch.nn.Identity(),
            *(numbers, numbers, numbers, None),
            cache=None,
            cu_seq_lens_q=torch.tensor([0, 1]),
            max_length_q=1,
            softcap=30.0,
        )


def test_other_models_and_devices_keep_their_attention(load: Load, tmp_path: Any) -> None:
    model = load("generation", save_writer(tmp_path / "llama"))
    assert paged_attention.attentions(model.model, may_graph=True) == ("sdpa",)
    assert model.model.config._attn_implementation == "sdpa"
