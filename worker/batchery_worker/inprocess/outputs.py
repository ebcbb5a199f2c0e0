"""What a function over stacked arrays answers, cut into one outcome per item."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batchery.errors import WrongLength


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; then torch is loaded."""
    torch = sys.modules.get("torch")
    # While another thread imports torch, it has no tensors yet.
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


class UnclearAnswer(Exception):
    """A list is either outcomes or outputs: a smaller batch will tell. No caller sees it."""


class Unstacker:
    """Cuts answers of one function; it may be used by several threads."""

    def __init__(self, trim: bool) -> None:
        """Has seen no answer.

        Args:
            trim: Whether rows are cut back to the tokens of their item.
        """
        self._trim = trim
        #: What the function means by a list: several outputs, or outcomes; None while unknown.
        self._lists_are_outputs: bool | None = None

    def rows(self, answer: Any, lengths: Sequence[int], name: str) -> Any:
        """One outcome per item; what is no array, tuple, dict or list is returned as it is.

        Args:
            answer: Of the function.
            lengths: The tokens of each item.
            name: Name of the function in errors.

        Raises:
            WrongLength: An output has not one row per item, or not the tokens of the longest item.
            UnclearAnswer: The function must be asked again, for fewer items.
        """
        if isinstance(answer, list):
            if not self._is_outputs(answer, len(lengths)):
                return answer
            answer = tuple(answer)
        if isinstance(answer, tuple | Mapping) or _is_array(answer):
            return self._rows(answer, lengths, f"{name}: the output")
        return answer

    def _is_outputs(self, answer: list[Any], items: int) -> bool:
        """Whether a list holds several outputs, and not one outcome per item."""
        could_be = len(answer) > 1 and all(
            _is_array(each) and each.shape[:1] == (items,) for each in answer
        )
        if len(answer) == items and not could_be:
            self._lists_are_outputs = False
        elif len(answer) != items and could_be and self._lists_are_outputs is None:
            self._lists_are_outputs = True
        if could_be and self._lists_are_outputs is None:
            raise UnclearAnswer("answer with a tuple, where there are several outputs")
        return could_be and bool(self._lists_are_outputs)

    def _rows(self, output: Any, lengths: Sequence[int], where: str) -> list[Any]:
        if isinstance(output, Mapping):
            columns = self._columns(output.items(), lengths, where)
            return [dict(zip(output, row, strict=True)) for row in zip(*columns, strict=True)]
        if isinstance(output, tuple | list):
            columns = self._columns(enumerate(output), lengths, where)
            return list(zip(*columns, strict=True))
        if not _is_array(output):
            raise WrongLength(
                f"{where} is of the type {type(output).__name__}; give an array with one row per"
                " item, or a list with one outcome per item"
            )
        return self._rows_of_array(output, lengths, where)

    def _columns(
        self, outputs: Iterable[tuple[Any, Any]], lengths: Sequence[int], where: str
    ) -> list[list[Any]]:
        """The rows of each output."""
        columns = [self._rows(each, lengths, f"{where}[{name!r}]") for name, each in outputs]
        if not columns:
            raise WrongLength(f"{where} is empty; give arrays with one row per item")
        return columns

    def _rows_of_array(self, output: Any, lengths: Sequence[int], where: str) -> list[Any]:
        shape = tuple(output.shape)
        items = len(lengths)
        if shape[:1] != (items,):
            raise WrongLength(
                f"{where} has {f'{shape[0]} rows' if shape else 'no dimension'} for {items} items;"
                " its first dimension must be the items"
            )
        if self._trim and shape[1:2] != (max(lengths),):
            raise WrongLength(
                f"{where} has the shape {list(shape)}; its second dimension must be the"
                f" {max(lengths)} tokens of the longest item, as trim=True cuts it back"
            )
        # For tensors it takes less than half as long as an index for each row.
        rows = output.unbind(0) if is_tensor(output) else list(output)
        if self._trim:
            rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        return _owned(rows, output)


def _is_array(value: Any) -> bool:
    """Whether it is an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _owned(rows: Iterable[Any], output: Any) -> list[Any]:
    """Copies the rows that would keep more than twice their own memory."""
    if is_tensor(output):
        held_bytes = output.untyped_storage().nbytes()
        return [row if 2 * row.nbytes >= held_bytes else row.clone() for row in rows]
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(output, numpy.ndarray) or output.ndim == 1:
        return list(rows)  # What one dimension holds are scalars or objects, and no views.
    base: Any = output
    while isinstance(base, numpy.ndarray) and base.base is not None:
        base = base.base
    held_bytes = getattr(base, "nbytes", output.nbytes)
    return [row if 2 * row.nbytes >= held_bytes else row.copy() for row in rows]
