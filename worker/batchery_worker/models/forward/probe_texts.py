"""Random texts to check a model with, the same at each start, and how results are compared."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.loading.tokenizer import Prepared


class RandomTexts:
    """Makes tokenized texts of any length."""

    def __init__(self, inputs: int, ids: NDArray[np.int64]) -> None:
        """Makes none yet.

        Args:
            inputs: Number of inputs of a tokenized text; all but the token ids are zeros.
            ids: Tokens to choose from.
        """
        self._inputs = inputs
        self._ids = ids

    def __call__(self, lengths: Sequence[int], seed: int = 0) -> list[Prepared]:
        """One text of each length, in tokens."""
        numbers = np.random.default_rng((seed, *lengths))
        texts = []
        for length in lengths:
            text = np.zeros((self._inputs, length), dtype=np.int64)
            text[0] = numbers.choice(self._ids, length)
            texts.append(text)
        return texts


def size(values: Tensor) -> float:
    """Size of a usual number of a tensor: the root of the mean square; NaN where one is."""
    return float(values.float().square().mean().sqrt())


def worst_difference(
    found: Sequence[Tensor], expected: Sequence[Tensor], scale: float = 0.0
) -> float:
    """Maximum difference of two results of one text, relative to the largest size of any text.

    The size of a single text would not do: a head may give almost zeros for it.

    Args:
        found: One tensor per text.
        expected: Of the same shapes.
        scale: Size of other results of the model, which counts if it is larger.

    Returns:
        NaN where either side has one.
    """
    scale = max(scale, 1e-12, *map(size, expected))
    sizes = [size(one.float() - other.float()) for one, other in zip(found, expected, strict=True)]
    return float(np.max(sizes) / scale)
