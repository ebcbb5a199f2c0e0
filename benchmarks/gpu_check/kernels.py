"""What torch has on this GPU."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

from batchery_worker.models.forward.attention import varlen_kernel
from benchmarks.engine.gpu import gpu_name
from benchmarks.gpu_check.check import Check

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
    if varlen_kernel() is None:
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


#: Name of a step -> what it does, in the order of the check.
STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "versions": versions,
}
