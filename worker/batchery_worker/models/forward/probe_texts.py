"""Random texts to check a model with, the same at each start."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
