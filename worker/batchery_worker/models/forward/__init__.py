"""What all forward passes have in common, and the random texts that they are checked with."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.tokenizer import Prepared

#: Makes a row per text, (B, ...) float32, of the output of transformers, and of what modules of
#: sentence-transformers know of its inputs. Of a padded batch that is `input_ids` and
#: `attention_mask`, (B, L). Of a row of texts it is `input_ids`, (1, T); `cu_seq_lens_q`, the ends
#: of the texts behind a 0, (B + 1,); `seq_idx`, the place of the text of each token, (1, T); and
#: `lengths` of the texts, a list of integers.
Read = Callable[[Any, dict[str, Any]], Tensor]

#: What is read of a pass, all float32 and in batch order.
#: A row per text, (B, ...): what the head says (`logits`), or what a function makes of the output.
#: A row per token, (T, ...): what the head says of each (`token_logits`), and their vectors.
Reading = Literal["logits", "token_logits", "token_vectors"] | Read


class Forward(Protocol):
    """Runs a model on a micro-batch.

    Attributes:
        name: For the log.
        pads: See `batchery.Model`.
    """

    name: str
    pads: bool

    def values(self, batch: Sequence[Prepared], reading: Reading) -> Tensor:
        """Runs the model on a batch; returns what is read of its output."""


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
