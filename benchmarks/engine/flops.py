"""How much arithmetic a text needs, and how much a device could do: utilisation is their ratio.

Of an encoder with N layers, width D, inner width F and a text of L tokens, with a multiplication
and an addition counted as two, and without words, norms and softmax (after Megatron-LM, Narayanan
et al. 2021, and PaLM, Chowdhery et al. 2022, appendix B):

    N * L * (8 * D * D + 4 * D * F + 4 * L * D)

for the four projections, the two inner layers, and the scores and the mixing of attention.
"""

from collections.abc import Sequence

from batchery_worker.models.hardware.devices import PEAK_FLOPS
from benchmarks.engine.models import Shape


def flops_of(shape: Shape, lengths: Sequence[int]) -> float:
    """Floating-point operations of one forward pass over texts of these lengths, unpadded."""
    width, inner = shape.hidden, shape.intermediate
    per_token = 8 * width * width + 4 * width * inner
    return float(
        shape.layers * sum(length * (per_token + 4 * length * width) for length in lengths)
    )


def peak_of(gpu: str, dtype: str) -> float | None:
    """What a GPU could do per second on its tensor cores; None where nobody has looked it up.

    Args:
        gpu: As NVIDIA names it.
        dtype: `bf16` or `fp16`; for fp32 it depends on a switch.
    """
    if dtype == "fp32":
        return None
    return next((peak for words, peak in PEAK_FLOPS.items() if words in gpu), None)
