"""How much arithmetic a text needs.

Of an encoder with N layers, width D, inner width F and a text of L tokens, with a multiplication
and an addition counted as two, and without words, norms and softmax (after Megatron-LM, Narayanan
et al. 2021, and PaLM, Chowdhery et al. 2022, appendix B):

    N * L * (8 * D * D + 4 * D * F + 4 * L * D)

for the four projections, the two inner layers, and the scores and the mixing of attention.
"""

from collections.abc import Sequence

from benchmarks.engine.models import Shape


def flops_of(shape: Shape, lengths: Sequence[int]) -> float:
    """Floating-point operations of one forward pass over texts of these lengths, unpadded."""
    width, inner = shape.hidden, shape.intermediate
    per_token = 8 * width * width + 4 * width * inner
    return float(
        shape.layers * sum(length * (per_token + 4 * length * width) for length in lengths)
    )
