"""Items that are dicts of arrays or tensors: padded into one array per feature, and cut back.

Neither numpy nor torch is loaded before an item needs it.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from batchery.errors import BatchArgumentError, DeviceUnavailable, InvalidItem, WrongLength

if TYPE_CHECKING:
    from batchery_worker.models.hardware.transfers import HostToDevice

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

    A row is a view of the answer, unless it is less than half of the memory behind the answer.
    Then it is a copy, so that a result that is kept for long does not keep its whole batch.
    """

    def __init__(
        self,
        pad: Mapping[str, float] | None = None,
        mask: str | None = None,
        trim: bool = False,
        device: str | None = None,
    ) -> None:
        """Loads nothing.

        Args:
            pad: Feature -> the number that it is padded with. Other features are stacked.
            mask: A feature that is 1 for tokens and 0 for padding, int64. It is made where items do
                not bring it. Where they do, it is padded with 0, and keeps its dtype.
            trim: Whether the second dimension of every output is tokens: then each row is cut back
                to the tokens of its item.
            device: Where the function wants its tensors, such as "cuda:0". Numpy arrays become
                tensors. Copies to CUDA run on a stream of their own, from pinned memory, and the
                current stream waits for them. By default, everything stays where it is.

        Raises:
            BatchArgumentError: One of them is impossible.
        """
        if not isinstance(pad, Mapping | None) or not all(
            isinstance(fill, int | float) for fill in (pad or {}).values()
        ):
            raise BatchArgumentError(
                f'pad={pad!r}: give a number per feature, such as {{"input_ids": 0}}'
            )
        if not isinstance(mask, str | None) or (pad or {}).get(mask or "", 0):
            raise BatchArgumentError(f"mask={mask!r}: name a feature; it is padded with 0")
        if (mask is not None or trim) and not pad:
            raise BatchArgumentError("mask and trim need pad, which says what has tokens")
        if not isinstance(device, str | None):
            raise BatchArgumentError(f'device={device!r}: give a name, such as "cuda:0"')
        self._fill = dict(pad or {})
        #: An item needs one of them.
        self._padded = tuple(self._fill)
        self._mask = mask
        if mask is not None:
            self._fill[mask] = 0
        self._device = device
        self._to_device: HostToDevice | None = None
        self._trim = trim
        self._spelled = lru_cache(MAX_SPELLED_KEYS)(self._encode)

    @property
    def pads(self) -> bool:
        """Whether items have a number of tokens."""
        return bool(self._padded)

    @property
    def device_type(self) -> str:
        """The kind of the device, such as "cuda"; "cpu" where none was given."""
        return (self._device or "cpu").partition(":")[0]

    def length(self, item: Any) -> int:
        """The number of tokens of an item: the length of its features in `pad`."""
        return self.features(item).length

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
        arrays, signature = {}, []
        length = 0
        for name, value in item.items():
            array = arrays[name] = _array(name, value)
            shape = tuple(array.shape)
            if name in self._fill:
                length = _tokens(name, shape, length)
                shape = shape[1:]
            kind = array.device if is_tensor(array) else "numpy"
            signature.append((name, kind, array.dtype, shape))
        if self._padded and not any(name in arrays for name in self._padded):
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

        Raises:
            DeviceUnavailable: There is no such device.
        """
        lengths = [each.length for each in items]
        stacked = {}
        for name in items[0].arrays:
            column = [each.arrays[name] for each in items]
            is_padded = name in self._fill and min(lengths) < max(lengths)
            stacked[name] = (
                _padded(column, lengths, self._fill[name]) if is_padded else _stacked(column)
            )
        if self._mask is not None and self._mask not in stacked:
            like = next(stacked[name] for name in self._padded if name in stacked)
            stacked[self._mask] = _build_mask(lengths, like)
        return stacked if self._device is None else self._sent(stacked, self._device)

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
        return list(map(own_row, answer)) if isinstance(answer, list) else answer

    def _encode(self, signature: Signature) -> str:
        """The key of items; checks that their features can hold what they are padded with."""
        for name, _, dtype, _ in signature:
            fill = self._fill.get(name, 0)
            if not _holds(dtype, fill):
                raise InvalidItem(f"feature {name} is {dtype}, and cannot be padded with {fill}")
        return repr(
            [(name, str(kind), str(dtype), shape) for name, kind, dtype, shape in signature]
        )

    def _sent(self, stacked: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The same on the device, without waiting for the end of the copies."""
        if self._to_device is None:
            self._to_device = _host_to_device(name)
        return {
            # Items that are on a device have no part in pinned memory.
            feature: each.to(name)
            if is_tensor(each) and each.device.type != "cpu"
            else self._to_device.send(each)
            for feature, each in stacked.items()
        }


def _array(name: Any, value: Any) -> Any:
    """A tensor as it is; anything else as a numpy array of numbers."""
    if not isinstance(name, str):
        raise InvalidItem(f"feature {name!r:.80}: the name of a feature is a text")
    if is_tensor(value):
        return value
    import numpy as np

    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InvalidItem(f"feature {name} is no array of numbers ({error})") from None
    if value.dtype.kind not in NUMBER_KINDS:
        raise InvalidItem(f"feature {name} is no array of numbers, but of {value.dtype}")
    return value


def _tokens(name: str, shape: tuple[int, ...], length: int) -> int:
    """The tokens of a padded feature; 0 stands for a length that is not known yet."""
    if not shape:
        raise InvalidItem(f"feature {name} is a scalar; it is padded, so give an array of tokens")
    if not shape[0]:
        raise InvalidItem(f"feature {name} is empty; give at least one token")
    if length and shape[0] != length:
        raise InvalidItem(
            f"feature {name} has {shape[0]} tokens, and those before it {length};"
            " padded features of an item have the same number of tokens"
        )
    return shape[0]


def _holds(dtype: Any, fill: float) -> bool:
    """Whether an array of this dtype can hold a number as it is; of fractions, nearly."""
    torch: Any = sys.modules.get("torch")
    try:
        of_torch: Any = getattr(torch, "dtype", ())
        if isinstance(dtype, of_torch):
            if dtype.is_floating_point or dtype.is_complex:
                return True
            # `pad_sequence` takes a float, whatever the dtype.
            return bool(torch.full((), fill, dtype=dtype).item() == fill == float(fill))
        import numpy as np

        with np.errstate(invalid="ignore"):
            return dtype.kind in "fc" or bool(np.full((), fill, dtype).item() == fill)
    except (ValueError, OverflowError, RuntimeError):
        return False


def _stacked(column: Sequence[Any]) -> Any:
    """Arrays of one shape as one: [items, ...]."""
    if is_tensor(column[0]):
        return sys.modules["torch"].stack(column)
    import numpy as np

    return np.stack(column)


def _padded(column: Sequence[Any], lengths: Sequence[int], fill: float) -> Any:
    """Arrays of several lengths as one: [items, tokens of the longest, ...]."""
    if is_tensor(column[0]):
        pad_sequence = sys.modules["torch"].nn.utils.rnn.pad_sequence
        # For 64 texts of 100 tokens it takes half as long as a copy of each into `torch.full`.
        return pad_sequence(column, batch_first=True, padding_value=fill)
    import numpy as np

    first = column[0]
    padded = np.full((len(column), max(lengths), *first.shape[1:]), fill, first.dtype)
    for row, length, array in zip(padded, lengths, column, strict=True):
        row[:length] = array
    return padded


def _build_mask(lengths: Sequence[int], like: Any) -> Any:
    """1 for tokens and 0 for padding: int64, [items, tokens of the longest]."""
    longest = max(lengths)
    if is_tensor(like):
        torch = sys.modules["torch"]
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        return mask.long().to(like.device)
    import numpy as np

    return (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)


def _host_to_device(name: str) -> "HostToDevice":
    """Copies to a device; loads torch."""
    from batchery_worker.models.hardware.transfers import HostToDevice

    torch = sys.modules["torch"]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceUnavailable(f"device={name!r}: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable(f"device={name!r}: torch finds no CUDA device")
    return HostToDevice(device)


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor; then torch is loaded."""
    torch = sys.modules.get("torch")
    # While another thread imports torch, it has no tensors yet.
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def _rows(output: Any, lengths: Sequence[int], where: str, trim: bool) -> list[Any]:
    if isinstance(output, tuple | list | Mapping):
        parts = output if isinstance(output, Mapping) else dict(enumerate(output))
        columns = [_rows(each, lengths, f"{where}[{name!r}]", trim) for name, each in parts.items()]
        if not columns:
            raise WrongLength(f"{where} is empty; give arrays with one row per item")
        rows = zip(*columns, strict=True)
        if isinstance(output, Mapping):
            return [dict(zip(output, row, strict=True)) for row in rows]
        return list(rows)
    shape = tuple(output.shape) if _is_array(output) else ()
    items = len(lengths)
    if shape[:1] != (items,):
        raise WrongLength(
            f"{where} is of the type {type(output).__name__} and the shape {list(shape)} for"
            f" {items} items; its first dimension must be the items"
        )
    if trim and shape[1:2] != (max(lengths),):
        raise WrongLength(
            f"{where} has the shape {list(shape)}; its second dimension must be the"
            f" {max(lengths)} tokens of the longest item, as trim=True cuts it back"
        )
    # For tensors it takes less than half as long as an index for each row.
    rows_of_it = output.unbind(0) if is_tensor(output) else list(output)
    if trim:
        rows_of_it = [row[:length] for row, length in zip(rows_of_it, lengths, strict=True)]
    if not trim and own_row(rows_of_it[0]) is rows_of_it[0]:
        return rows_of_it  # All are of one size.
    return [own_row(row) for row in rows_of_it]


def _is_array(value: Any) -> bool:
    """Whether it is an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def own_row(row: Any) -> Any:
    """A row of an array; a copy if it would keep more than twice its own memory."""
    if not hasattr(type(row), "shape"):
        return row  # Most are no array, and are told so in no time.
    if is_tensor(row):
        return row if 2 * row.nbytes >= row.untyped_storage().nbytes() else row.clone()
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(row, numpy.ndarray):
        return row
    base: Any = row
    while isinstance(base, numpy.ndarray) and base.base is not None:
        base = base.base
    return row if 2 * row.nbytes >= getattr(base, "nbytes", row.nbytes) else row.copy()
