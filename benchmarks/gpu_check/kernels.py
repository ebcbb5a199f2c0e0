"""What torch has for texts in a row on this GPU, and whether it is right."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from batchery_worker.models.forward.attention import (
    varlen_kernel,
)
from batchery_worker.models.forward.selection import CHECK_LENGTHS
from benchmarks.engine.gpu import gpu_name
from benchmarks.gpu_check.check import Check

#: Maximum difference of the attention's two ways, relative to the size of its results, in bf16.
TOLERANCE = 1e-2

#: Name -> query heads, key heads, width of a head, and how far a token sees to the left and to the
#: right. MiniLM's heads have a width of 32, those of the other models one of 64.
CASES = {
    "plain": (12, 12, 64, (-1, -1)),
    "plain, heads as in MiniLM": (12, 12, 32, (-1, -1)),
    "causal": (12, 12, 64, (-1, 0)),
    "window of 64 on both sides": (12, 12, 64, (64, 64)),
    "causal window of 64": (12, 12, 64, (64, 0)),
    "grouped heads": (32, 8, 64, (-1, -1)),
    "grouped heads, causal": (32, 8, 64, (-1, 0)),
}

#: For how long products are computed without a pause, in ms: by then a GPU has its lasting clock.
SUSTAINED_MS = 1500.0


def versions(check: Check) -> dict[str, Any]:
    """Versions, and what attention there is to choose from."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "gpu": gpu_name(check.device),
        "priority_of_sdpa": torch._C._get_sdp_priority_order(),
        "operator": str(torch.ops.aten._flash_attention_forward.default._schema),
    }
    if not check.dry:
        found["capability"] = torch.cuda.get_device_capability(check.device)
    found["product_tflops"] = {
        name: round(flops / 1e12, 2) for name, flops in product_flops(check).items()
    }
    kernel = varlen_kernel()
    if kernel is None:
        found["problem"] = "no attention for rows of texts is found: nothing will be packed"
    found["note"] = f"torch {torch.__version__}, {found['gpu'] or 'no GPU'}"
    return found


def product_flops(check: Check) -> dict[str, float]:
    """FLOPs per second of a large matrix product: what there is to have on this very device.

    `burst` is the fastest of some single products, and `sustained` many without a pause, as a
    batch after the other: heat and power lower a GPU's clock within a second.
    """
    size = 256 if check.dry else 8192
    dtype = torch.float32 if check.dry else torch.bfloat16
    one, other = (torch.randn(size, size, device=check.device, dtype=dtype) for _ in range(2))
    # One result for all products: on a GPU that is behind, each would have memory of its own.
    into = torch.empty_like(one)

    def multiply(times: int = 1) -> None:
        for _ in range(times):
            torch.matmul(one, other, out=into)

    best_ms = min(check.device_ms(multiply) for _ in range(check.repeats(20)))
    count = check.repeats(max(1, round(SUSTAINED_MS / best_ms)))
    took_ms = check.device_ms(lambda: multiply(count))
    flops = 2 * size**3
    return {"burst": flops / (best_ms / 1e3), "sustained": count * flops / (took_ms / 1e3)}


def varlen_against_sdpa(check: Check) -> dict[str, Any]:
    """The kernel, against one call of sdpa per text, on random numbers."""
    rows = []
    for name, kernel in _kernels(check).items():
        for case, (heads, key_heads, width, window) in CASES.items():
            row: dict[str, Any] = {"kernel": name, "case": case}
            try:
                row["difference"] = _difference(check, kernel, heads, key_heads, width, window)
            except Exception as error:  # noqa: BLE001 (the next case may work)
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
    # Written so that NaN is bad.
    bad = [row for row in rows if not row.get("difference", 1.0) < TOLERANCE]
    found: dict[str, Any] = {"rows": rows, "note": f"{len(rows) - len(bad)} of {len(rows)} right"}
    if bad:
        found["problem"] = "; ".join(f"{row['kernel']}, {row['case']}" for row in bad)
    return found


def _kernels(check: Check) -> dict[str, Callable[..., Tensor]]:
    if check.dry:
        return {"stand-in": _stand_in}
    kernel = varlen_kernel()
    return {} if kernel is None else {"operator": kernel}


def _difference(
    check: Check,
    kernel: Callable[..., Tensor],
    heads: int,
    key_heads: int,
    width: int,
    window: tuple[int, int],
) -> float:
    """Maximum difference of a text, relative to the size of its results."""
    torch.manual_seed(1)
    dtype = torch.float32 if check.dry else torch.bfloat16
    lengths, total = CHECK_LENGTHS, sum(CHECK_LENGTHS)
    query, key, value = (
        torch.randn(total, count, width, device=check.device, dtype=dtype)
        for count in (heads, key_heads, key_heads)
    )
    ends = torch.tensor([0, *lengths], device=check.device).cumsum(0).to(torch.int32)
    scale = width**-0.5
    found = torch.split(kernel(query, key, value, ends, max(lengths), scale, window), [*lengths])
    parts = (torch.split(each, [*lengths]) for each in (query, key, value))
    expected = [
        _masked(queries, keys, values, scale, _seen(torch.arange(len(queries)), window))
        for queries, keys, values in zip(*parts, strict=True)
    ]
    return max(
        float((one.float() - other.float()).norm() / other.float().norm())
        for one, other in zip(found, expected, strict=True)
    )


def _seen(places: Tensor, window: tuple[int, int]) -> Tensor:
    behind = places[:, None] - places[None, :]
    left, right = window
    return ((behind <= left) | (left < 0)) & ((-behind <= right) | (right < 0))


def _masked(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor) -> Tensor:
    """Attention of tokens given as (T, H, D), of which each sees those that it may."""
    queries, keys, values = (each.transpose(0, 1)[None].float() for each in (query, key, value))
    out = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=seen.to(query.device),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1).to(query.dtype)


def _stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
    keys: tuple[Tensor, int] | None = None,
) -> Tensor:
    """The kernel on a CPU: one attention for all tokens, masked between texts."""
    assert keys is None
    assert longest == int(ends.diff().max())
    places = torch.arange(len(query))
    text = torch.searchsorted(ends, places.to(ends.dtype), right=True)
    seen = _seen(places, window) & (text[:, None] == text[None, :])
    return _masked(query, key, value, scale or query.shape[-1] ** -0.5, seen)


#: Name of a step -> what it does, in the order of the check.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "versions": versions,
    "varlen against sdpa": varlen_against_sdpa,
}
