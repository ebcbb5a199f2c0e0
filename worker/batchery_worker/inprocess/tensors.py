"""Items that are dicts of arrays or tensors: padded into one array per feature, and cut back.

Neither numpy nor torch is loaded before an item needs it.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import is_not, itemgetter
from typing import Any, NamedTuple

from batchery.errors import InvalidItem, WrongLength
from batchery_worker.inprocess.options import BatcherOptions

#: Kinds of numpy's dtypes that are numbers: bool, integers, floats, complex numbers.
NUMBER_KINDS = "biufc"

#: Maximum number of keys that a collator keeps spelled: images of many sizes have many.
MAX_SPELLED_KEYS = 1024

#: What items of one batch share: name, device or "numpy", dtype and fixed shape of each feature.
Signature = tuple[tuple[str, Any, Any, tuple[int, ...]], ...]


class Features(NamedTuple):
    """An item that was checked: what a batch needs of it.

    Attributes:
        arrays: An array or a tensor per feature; those that are padded have tokens first.
        length: The number of tokens, at least 1; 1 where nothing is padded.
        key: Equal for items that may share a batch: the same features, of the same dtypes and
            shapes but for the tokens, all numpy arrays or all tensors on the same device.
    """

    arrays: Mapping[str, Any]
    length: int
    key: str


class Collator:
    """Makes arrays of the items of a batch, and one result per item of the answer.

    An item is a dict with a value per feature: a numpy array, a torch tensor, or numbers in lists,
    which become a numpy array. The batch function gets one dict, with an array per feature:

    - A feature in `pad` has the shape [items, tokens, ...]. Each item is padded at its end to the
      longest one of this call of the function.
    - Any other feature is stacked: it has the shape [items, ...].
    - `mask` is a feature of the shape [items, tokens].

    Row `i` of every array is the same item; rows go from the longest item to the shortest. Dtypes
    stay as they are, and tensors stay tensors. Items whose features have different names, dtypes or
    shapes, or are not of one kind, never share a batch.

    The function answers one of these:

    - An array or a tensor, whose first dimension is the items. Each item gets its row. A row of an
      array with one dimension is a scalar of that kind.
    - Several of them, in a tuple or a dict, also in one another. Each item gets a tuple or a dict
      of its rows.
    - A list with one outcome per item, as from any batch function: a value, or `Failed`.

    Options:

    - `pad`: feature -> the number that it is padded with. Other features are stacked.
    - `mask`: a feature that is 1 for tokens and 0 for padding, int64. It is made where items do
      not bring it. Where they do, it is padded with 0, and keeps its dtype.
    - `trim`: whether the second dimension of every output is tokens: then each row is cut back to
      the tokens of its item.
    """

    def __init__(self, options: BatcherOptions) -> None:
        """Loads nothing."""
        #: Features with tokens, of which an item needs one; and what they are padded with.
        self._padded = dict(options.pad or {})
        self._mask = options.mask
        self._fill = self._padded | ({} if self._mask is None else {self._mask: 0})
        self._trim = options.trim
        self._spelled = lru_cache(MAX_SPELLED_KEYS)(self._spell)

    def features(self, item: Any) -> Features:
        """Checks an item; in its caller's thread.

        Raises:
            InvalidItem: It is no dict of arrays of numbers; or its features in `pad` are missing,
                have no tokens, or have not the same number of tokens.
        """
        if not isinstance(item, Mapping) or not item:
            raise InvalidItem(
                f"an item is {item!r:.40}; give a dict with an array of numbers per feature"
            )
        arrays, signature, length = {}, [], 0
        for name, value in item.items():
            array = arrays[name] = _array(name, value)
            shape = tuple(array.shape)
            if name in self._fill:
                if not shape or not shape[0] or length not in (0, shape[0]):
                    raise InvalidItem(
                        f"feature {name} has the shape {list(shape)}; its first dimension must be"
                        f" {length or 'one or more'} tokens, as it is padded"
                    )
                length, shape = shape[0], shape[1:]
            kind = array.device if is_tensor(array) else "numpy"
            signature.append((name, kind, array.dtype, shape))
        if self._padded and self._padded.keys().isdisjoint(arrays):
            raise InvalidItem(
                f"an item has the features {', '.join(arrays)}, and none that is padded:"
                f" {', '.join(self._padded)}"
            )
        # Names differ, so nothing else is compared.
        signature.sort(key=itemgetter(0))
        return Features(arrays, length or 1, self._spelled(tuple(signature)))

    def stack(self, items: Sequence[Features]) -> dict[str, Any]:
        """One array per feature, rows in the order of the items.

        Args:
            items: At least one; all have the same key.
        """
        lengths = [each.length for each in items]
        fills = self._fill if min(lengths) < max(lengths) else {}
        stacked = {
            name: _stacked([each.arrays[name] for each in items], lengths, fills.get(name))
            for name in items[0].arrays
        }
        if self._mask is not None and self._mask not in stacked:
            like = next(stacked[name] for name in self._padded if name in stacked)
            stacked[self._mask] = _build_mask(lengths, like)
        return stacked

    def rows(self, answer: Any, lengths: Sequence[int], name: str) -> Any:
        """One outcome per item.

        Args:
            answer: Of the function, for one call of `stack`.
            lengths: The tokens of each item of that call.
            name: Name of the function in errors.

        Raises:
            WrongLength: An output has not one row per item; or one is to be cut back, and its
                second dimension is not the tokens of the longest item.
        """
        if isinstance(answer, tuple | Mapping) or _is_array(answer):
            return _rows(answer, lengths, f"{name}: the output", self._trim)
        return answer

    def _spell(self, signature: Signature) -> str:
        """The key of items; checks that their features can hold what they are padded with."""
        for name, _, dtype, _ in signature:
            if not _holds(dtype, fill := self._fill.get(name, 0)):
                raise InvalidItem(f"feature {name} is {dtype}, and cannot be padded with {fill}")
        return repr([(name, str(kind), str(dtype), own) for name, kind, dtype, own in signature])


def _array(name: Any, value: Any) -> Any:
    """A tensor as it is; anything else as a numpy array of numbers."""
    if not isinstance(name, str):
        raise InvalidItem(f"feature {name!r:.80}: the name of a feature is a text")
    if is_tensor(value):
        return value
    import numpy as np

    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidItem(f"feature {name} is no array of numbers ({error})") from None
    if array.dtype.kind not in NUMBER_KINDS:
        raise InvalidItem(f"feature {name} is no array of numbers, but of {array.dtype}")
    return array


def _holds(dtype: Any, fill: float) -> bool:
    """Whether an array of this dtype can hold a number as it is; of fractions, nearly."""
    name = getattr(dtype, "name", str(dtype))
    if "float" in name or "complex" in name:
        return True
    if "bool" in name:
        return fill in (0, 1)
    info = sys.modules["torch" if name.startswith("torch") else "numpy"].iinfo(dtype)
    # `pad_sequence` takes a float, whatever the dtype.
    return bool(info.min <= fill <= info.max and fill == float(fill) == round(fill))


def _library(array: Any) -> Any:
    """Whose array it is: numpy or torch, which name most things alike."""
    return sys.modules["torch" if is_tensor(array) else "numpy"]


def _stacked(column: Sequence[Any], lengths: Sequence[int], fill: float | None) -> Any:
    """Arrays as one: [items, ...]; padded to the longest, if there is what to pad with."""
    library, first = _library(column[0]), column[0]
    if fill is None:
        return library.stack(column)
    if is_tensor(first):
        # For 64 texts of 100 tokens it takes half as long as a copy of each into `torch.full`.
        return library.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=fill)
    padded = library.full((len(column), max(lengths), *first.shape[1:]), fill, first.dtype)
    for row, length, array in zip(padded, lengths, column, strict=True):
        row[:length] = array
    return padded


def _build_mask(lengths: Sequence[int], like: Any) -> Any:
    """1 for tokens and 0 for padding: int64, [items, tokens of the longest]."""
    library = _library(like)
    mask = (library.arange(max(lengths)) < library.asarray(lengths)[:, None]) * 1
    return mask.to(like.device) if is_tensor(like) else mask


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; then torch is loaded."""
    torch = sys.modules.get("torch")
    # While another thread imports torch, it has no tensors yet.
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _rows(output: Any, lengths: Sequence[int], where: str, trim: bool) -> Sequence[Any]:
    is_dict = isinstance(output, Mapping)
    if is_dict or isinstance(output, tuple | list):
        parts = output.items() if is_dict else enumerate(output)
        columns = [_rows(each, lengths, f"{where}[{name!r}]", trim) for name, each in parts]
        if not columns:
            raise WrongLength(f"{where} is empty; give arrays with one row per item")
        rows = list(zip(*columns, strict=True))
        return [dict(zip(output, row, strict=True)) for row in rows] if is_dict else rows
    shape = tuple(output.shape) if _is_array(output) else ()
    wanted = (len(lengths), max(lengths))[: 1 + trim]
    if shape[: len(wanted)] != wanted:
        tokens = f", and its second one the {max(lengths)} tokens of the longest" * trim
        raise WrongLength(
            f"{where} is of the type {type(output).__name__} and the shape {list(shape)};"
            f" its first dimension must be the {len(lengths)} items{tokens}"
        )
    # For tensors it takes less than half as long as an index for each row.
    views = output.unbind(0) if is_tensor(output) else output
    return [row[:length] for row, length in zip(views, lengths, strict=True)] if trim else views


def _is_array(value: Any) -> bool:
    """Whether it is an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def own_rows(outcome: Any) -> Any:
    """An outcome whose arrays keep at most twice their own memory alive: others are copied.

    So a result that is kept for long does not keep its whole batch.
    """
    kind = type(outcome)
    if kind is dict:
        named = {name: own_rows(each) for name, each in outcome.items()}
        return named if any(map(is_not, named.values(), outcome.values())) else outcome
    if kind is tuple:
        parts = tuple(map(own_rows, outcome))
        return parts if any(map(is_not, parts, outcome)) else outcome
    if hasattr(kind, "nbytes"):
        if is_tensor(outcome):
            whole = outcome.untyped_storage().nbytes()
            return outcome.clone() if 2 * outcome.nbytes < whole else outcome
        whole = getattr(getattr(outcome, "base", None), "nbytes", 0)
        return outcome.copy() if 2 * outcome.nbytes < whole else outcome
    return outcome
