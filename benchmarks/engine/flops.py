"""How much arithmetic a text needs, and how much a device could do: utilisation is their ratio.

Of an encoder with N layers, width D, inner width F and a text of L tokens, with a multiplication
and an addition counted as two, and without words, norms and softmax (after Megatron-LM, Narayanan
et al. 2021, and PaLM, Chowdhery et al. 2022, appendix B):

    N * L * (8 * D * D + 4 * D * F + 4 * L * D)

for the four projections, the two inner layers, and the scores and the mixing of attention.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from benchmarks.engine.models import Shape

#: Words in a GPU's name -> dense bf16 or fp16 FLOPs per second on its tensor cores, without
#: sparsity and at boost clocks, from NVIDIA's data sheets. The first that fits counts.
PEAKS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2.25e15,
        "H200": 989.4e12,
        "H100 PCIe": 756.5e12,
        "H100": 989.4e12,
        "A100": 312e12,
        "L40S": 362e12,
        "L4": 121e12,
        "A10": 125e12,
        "T4": 65e12,
    }
)


def flops_of(shape: Shape, lengths: Sequence[int]) -> float:
    """Floating-point operations of one forward pass over texts of these lengths, unpadded."""
    width, inner = shape.hidden, shape.intermediate
    per_token = 8 * width * width + 4 * width * inner
    return float(
        shape.layers * sum(length * (per_token + 4 * length * width) for length in lengths)
    )


def peak_of(gpu: str, dtype: str) -> float | None:
    """What a GPU could do per second; None where nobody has looked it up.

    Args:
        gpu: As NVIDIA names it.
        dtype: `bf16` or `fp16`; for fp32 it depends on a switch.
    """
    if dtype == "fp32":
        return None
    return next((peak for words, peak in PEAKS.items() if words in gpu), None)
