"""CUDA's attention for rows of texts, by stand-ins with the signatures of several torch versions.

The stand-ins compute on the CPU what they are asked for, in the terms of
`scaled_dot_product_attention`.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchery_worker.models.forward import attention
from batchery_worker.models.forward.attention import (
    Row,
    kernel_of_operator,
    row_of_texts,
    varlen_kernel,
)

ENDS = [0, 4, 8, 9, 16]


def by_text(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    assert (ends.tolist(), ends.dtype, longest) == (ENDS, torch.int32, 7)
    left, right = window
    rows = []
    for start, end in pairwise(ENDS):
        places = torch.arange(end - start)
        behind = places[:, None] - places[None, :]
        seen = ((behind <= left) | (left < 0)) & ((-behind <= right) | (right < 0))
        query, key, value = (
            each[start:end].transpose(0, 1)[None] for each in (queries, keys, values)
        )
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


#: Arguments of `aten::_flash_attention_forward` by which its versions differ, all keyword only.
OPERATORS = {
    "2.2": ("scale",),
    "2.6": ("scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes"),
    "2.13": tuple(
        argument.name
        for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ),
}


def operator(version: str) -> Any:
    """A stand-in for torch's operator: what it returns, and what it does not know."""
    known = set(OPERATORS[version])

    def run(*given: Any, **how: Any) -> tuple[Tensor, ...]:
        assert how.keys() <= known
        query, key, value, ends, same, longest, _, dropout, is_causal, debug_mask = given
        assert (ends is same, dropout, debug_mask) == (True, 0.0, False)
        window = (how["window_size_left"], how["window_size_right"])
        assert is_causal == (window == (-1, 0))
        out = by_text(query, key, value, ends, longest, how["scale"], window)
        return out, torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0)

    run._schema = SimpleNamespace(  # type: ignore[attr-defined]
        arguments=[SimpleNamespace(name=name) for name in known]
    )
    return run


KERNELS = {
    "operator of 2.6": kernel_of_operator(operator("2.6")),
    "operator of 2.13": kernel_of_operator(operator("2.13")),
}


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_kernel_for_rows_gets_the_options_of_the_layer(
    kernel: Any,
    causal: bool,
    window: int | None,
    key_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = (torch.randn(1, heads, 16, 8) for heads in (4, key_heads, key_heads))
    monkeypatch.setattr(attention, "varlen_kernel", lambda: kernel)
    asked: dict[str, Any] = {"scaling": 0.3, "is_causal": causal, "sliding_window": window}
    answers = []
    for ends in (None, torch.tensor(ENDS, dtype=torch.int32)):
        with row_of_texts(Row([4, 4, 1, 7], ends)):
            out, _ = attention.attention(torch.nn.Identity(), query, key, value, None, **asked)
        assert out.shape == (1, 16, 4, 8)
        answers.append(out)
    torch.testing.assert_close(*answers)


def test_versions_without_scale_or_window_have_no_kernel() -> None:
    assert kernel_of_operator(operator("2.2")) is None


def test_this_torch_has_a_kernel_and_looks_for_it_once() -> None:
    # All layers of all passes ask for it.
    assert varlen_kernel() is varlen_kernel() is not None
