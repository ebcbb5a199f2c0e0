"""Where a tokenizer puts its special tokens, for texts that come as tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SpecialTokens:
    """The special tokens around one text, or around two.

    They are found by tokenizing short texts with and without them: tokenizers have no other way in
    common of saying so.

    Attributes:
        is_known: Whether the tokens of a text stand together among the special ones.
    """

    def __init__(self, tokenizer: Any, names: Sequence[str], probes: Sequence[str]) -> None:
        """Finds out.

        Args:
            tokenizer: Of transformers.
            names: Inputs of the model, token ids first.
            probes: As many texts as there will be: short ones, that differ.
        """
        whole = tokenizer(*([each] for each in probes))
        self._columns = [list(whole[name][0]) for name in names]
        #: Begin and end of each probe among all tokens.
        self._spans: list[tuple[int, int]] = []
        at = 0
        for probe in probes:
            bare = list(tokenizer([probe], add_special_tokens=False)["input_ids"][0])
            at = _position(bare, self._columns[0], at)
            self._spans.append((at, at + len(bare)))
            at += len(bare)
        self.is_known = all(0 <= start < end for start, end in self._spans)

    def __len__(self) -> int:
        """How many special tokens there are."""
        return len(self._columns[0]) - sum(end - start for start, end in self._spans)

    def around(self, *texts: Sequence[int]) -> NDArray[np.int64]:
        """Puts them around tokens.

        Args:
            texts: The tokens of each text; as many as there were probes.

        Returns:
            A row per input of the model, (I, L) int64.
        """
        rows: list[list[int]] = [[] for _ in self._columns]
        at = 0
        for text, (start, end) in zip(texts, self._spans, strict=True):
            for place, (row, column) in enumerate(zip(rows, self._columns, strict=True)):
                row += column[at:start]
                # All tokens of a text have the same type.
                row += text if place == 0 else [column[start]] * len(text)
            at = end
        for row, column in zip(rows, self._columns, strict=True):
            row += column[at:]
        return np.array(rows, dtype=np.int64)


def _position(part: Sequence[int], whole: Sequence[int], start: int) -> int:
    """Where a part begins, not before `start`; below 0 if nowhere."""
    if part and start >= 0:
        for place in range(start, len(whole) - len(part) + 1):
            if whole[place : place + len(part)] == part:
                return place
    return -1 - len(part)
