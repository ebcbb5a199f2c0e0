"""Which shapes small forward passes are rounded up to, so that there are few of them: pure."""

from collections.abc import Collection
from typing import NamedTuple

#: Texts and tokens per text. Powers of two: a pass has at most four times the tokens that it needs,
#: which costs next to nothing where launching costs more than computing.
TEXTS = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 64, 128, 256, 512)

#: Largest shape, in tokens: beyond that every device computes longer than the host launches.
MAX_TOKENS = 8192


class Shape(NamedTuple):
    """The shape of a padded forward pass.

    Attributes:
        texts: How many.
        length: Tokens of each.
    """

    texts: int
    length: int

    @property
    def tokens(self) -> int:
        """All of them, padding counted."""
        return self.texts * self.length


def shapes(max_length: int | None) -> list[Shape]:
    """All shapes of a model, smallest first.

    Args:
        max_length: Longest text in tokens; None where nothing limits it.
    """
    # The longest that a model takes is a shape, too: it may take no more.
    lengths = {length for length in LENGTHS if length <= (max_length or LENGTHS[-1])}
    if max_length is not None and max_length < LENGTHS[-1]:
        lengths.add(max_length)
    all_of_them = (Shape(texts, length) for texts in TEXTS for length in lengths)
    return sorted(
        (shape for shape in all_of_them if shape.tokens <= MAX_TOKENS),
        key=lambda shape: (shape.tokens, shape),
    )


def rounded(texts: int, length: int, there: Collection[Shape]) -> Shape | None:
    """The smallest of some shapes that has room; None where none has."""
    fit = [shape for shape in there if shape.texts >= texts and shape.length >= length]
    return min(fit, key=lambda shape: (shape.tokens, shape), default=None)
