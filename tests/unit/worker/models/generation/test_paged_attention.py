"""The attention for GPUs over a paged cache, with a kernel of the same contract for the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchery_worker.models.forward.attention import NotPackable
from batchery_worker.models.generation import paged_attention
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
    assert (longest, keys[1]) == (int(ends.diff().max()), int(keys[0].diff().max()))
    out = torch.empty_like(query)
    for at in range(len(ends) - 1):
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


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "has_kernel", lambda _: True)
    monkeypatch.setattr(paged_attention, "varlen_kernel", lambda: kernel)


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("architecture", ["llama", "qwen", "mistral", "gpt2"])
def test_texts_are_those_of_generate(architecture: str, load: Load, tmp_path: Any) -> None:
    folder = save_writer(tmp_path / architecture, architecture)
    # A prompt of 12 tokens a step, and a cache for a third of the jobs.
    model = load("generation", folder, slots=6, max_batch_tokens=12, cache_tokens=224)
    assert model.model.config._attn_implementation == paged_attention.NAME
    plain = PlainWriter(folder)
    prompts = list(dict.fromkeys(make_prompts(20)))
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 15}) for each in prompts)
    for prompt in prompts:
        assert outcomes[prompt]["text"] == plain.text(plain.write(prompt, 15))
    assert model._batch._processor.inputs_and_outputs.attention_mask is None


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
    assert paged_attention.attentions(model.model) == ("sdpa",)
    assert model.model.config._attn_implementation == "sdpa"
