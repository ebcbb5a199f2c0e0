"""Items that are dicts of arrays or tensors: padded into one array per feature, and cut back."""

from collections.abc import Mapping, Sequence
from typing import Any


class Collator:
    """Makes arrays of the items of a batch, and one result per item of the answer."""

    def __init__(
        self, pad: Mapping[str, float] | None = None, mask: str | None = None, trim: bool = False
    ) -> None:
        raise NotImplementedError

    def length(self, item: Any) -> int:
        """Number of tokens of an item."""
        raise NotImplementedError

    def stack(self, items: Sequence[Any]) -> Any:
        """One array per feature."""
        raise NotImplementedError

    def rows(self, outputs: Any, lengths: Sequence[int]) -> list[Any]:
        """One result per item."""
        raise NotImplementedError
