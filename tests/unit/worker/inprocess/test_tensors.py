"""Dicts of arrays in, one result per item out: what batches hold, and what is refused."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchery.errors import BatchArgumentError, InvalidItem, WrongLength
from batchery.outcomes import Failed
from batchery_worker.inprocess.batcher import BatchedFunction, batched
from batchery_worker.inprocess.options import BatcherOptions
from batchery_worker.inprocess.tensors import Collator
from batchery_worker.models.hardware import transfers  # noqa: F401 - before CUDA is a fake

#: How an item's numbers become an array of each kind.
KINDS: dict[str, Callable[..., Any]] = {"numpy": np.array, "torch": torch.tensor}

PAD = {"ids": 0, "types": -1}


@contextmanager
def batching(function: Callable[..., Any], **options: Any) -> Iterator[BatchedFunction[Any, Any]]:
    """A batcher that ends with the test."""
    with batched(function, **options) as made:
        yield made


def stacked(collator: Collator, *items: Mapping[str, Any]) -> dict[str, Any]:
    """What the function gets for these items."""
    return collator.stack([collator.features(each) for each in items])


def plain(value: Any) -> Any:
    """Numbers in lists, whatever they were in."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist()


# What a batch holds.


@pytest.mark.parametrize("kind", KINDS)
def test_padded_features_may_have_further_dimensions(kind: str) -> None:
    items = [{"frames": KINDS[kind]([[1.0, 2.0]] * length)} for length in (2, 1)]
    batch = stacked(Collator(BatcherOptions(pad={"frames": 0.5})), *items)
    assert plain(batch["frames"]) == [[[1, 2], [1, 2]], [[1, 2], [0.5, 0.5]]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fill", [0, -100])
def test_dtypes_and_kinds_stay_as_they_are(kind: str, fill: int) -> None:
    for dtype in ("int32", "int64", "float32", "complex64"):
        own = getattr(np if kind == "numpy" else torch, dtype)
        items = [{"ids": KINDS[kind]([1] * length, dtype=own)} for length in (3, 2)]
        column = stacked(Collator(BatcherOptions(pad={"ids": fill})), *items)["ids"]
        assert type(column) is type(items[0]["ids"])
        assert column.dtype == own
        assert plain(column) == [[1, 1, 1], [1, 1, fill]]


def test_features_outside_pad_are_stacked_even_scalars() -> None:
    batch = stacked(
        Collator(BatcherOptions()), {"x": [1, 2], "weight": 0.5}, {"x": [3, 4], "weight": 0.25}
    )
    assert plain(batch) == {"x": [[1, 2], [3, 4]], "weight": [0.5, 0.25]}


def test_a_batch_shares_no_memory_with_its_items() -> None:
    item = {"ids": np.ones(3)}
    batch = stacked(Collator(BatcherOptions(pad={"ids": 0})), item)
    batch["ids"][:] = 7
    assert plain(item["ids"]) == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_made_where_items_bring_none(kind: str) -> None:
    items = [{"ids": KINDS[kind]([1.0] * length)} for length in (3, 1)]
    mask = stacked(Collator(BatcherOptions(pad={"ids": 0}, mask="mask")), *items)["mask"]
    assert type(mask) is type(items[0]["ids"])
    assert str(mask.dtype).endswith("int64")
    assert plain(mask) == [[1, 1, 1], [1, 0, 0]]


def test_a_mask_that_items_bring_is_padded_with_0() -> None:
    items = [
        {"ids": [1, 2], "mask": np.array([True, False])},
        {"ids": [3], "mask": np.array([True])},
    ]
    mask = stacked(Collator(BatcherOptions(pad={"ids": 9}, mask="mask")), *items)["mask"]
    assert mask.dtype == np.bool_
    assert plain(mask) == [[True, False], [True, False]]


# What comes back.

OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "one": lambda x: x * 2,
    "tuple": lambda x: (x * 2, x + 1),
    "dict": lambda x: {"double": x * 2, "next": x + 1},
    "nested": lambda x: {"double": (x * 2, [x + 1])},
    "list of outcomes": lambda x: [row * 2 for row in x],
}


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("way", OUTPUTS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_batches_answer_what_single_items_do(
    kind: str, way: str, trim: bool, data: st.DataObject
) -> None:
    numbers = data.draw(
        st.lists(st.lists(st.integers(-99, 99), min_size=1, max_size=12), min_size=1)
    )

    def compute(batch: dict[str, Any]) -> Any:
        x = batch["ids"] * batch["mask"]
        # Without trimming, an output has no tokens: every item has its sum.
        return OUTPUTS[way](x if trim else x.sum(1))

    def alone(ids: list[int]) -> Any:
        given = KINDS[kind]([ids])
        answer = compute({"ids": given, "mask": given * 0 + 1})
        return plain(answer[0] if way == "list of outcomes" else first_row(answer))

    options = {"pad": {"ids": 5}, "mask": "mask", "trim": trim, "max_batch_tokens": 60}
    with batching(compute, **options) as function:
        results = function([{"ids": KINDS[kind](ids)} for ids in numbers])
    seen = [
        trimmed(plain(each), ids, way, trim) for each, ids in zip(results, numbers, strict=True)
    ]
    assert seen == [alone(ids) for ids in numbers]
    if way != "list of outcomes":
        assert all(is_of(kind, each) for each in results)


def first_row(output: Any) -> Any:
    """The first row of each array."""
    if isinstance(output, dict):
        return {name: first_row(each) for name, each in output.items()}
    if isinstance(output, tuple | list):
        return tuple(map(first_row, output))
    return output[0]


def trimmed(result: Any, ids: list[int], way: str, trim: bool) -> Any:
    """Outcomes of a list are the function's own: they are not cut back."""
    return result[: len(ids)] if way == "list of outcomes" and trim else result


def is_of(kind: str, result: Any) -> bool:
    """Whether a result is made of arrays of this kind."""
    if isinstance(result, tuple | dict):
        parts = result.values() if isinstance(result, dict) else result
        return all(is_of(kind, each) for each in parts)
    return isinstance(result, torch.Tensor if kind == "torch" else (np.ndarray, np.generic))


def test_a_list_of_outcomes_may_hold_failures() -> None:
    def compute(batch: dict[str, Any]) -> list[Any]:
        return [Failed("odd") if row.sum() % 2 else int(row.sum()) for row in batch["ids"]]

    with batching(compute, pad={"ids": 0}) as function:
        seen = function.options(return_exceptions=True)(
            [{"ids": [2]}, {"ids": [3]}, {"ids": [1, 3]}]
        )
    assert (seen[0], str(seen[1]), seen[2]) == (2, "odd", 4)


@pytest.mark.parametrize("make", [np.ones, torch.ones])
@pytest.mark.parametrize(
    "answer", [lambda rows: rows, list, lambda rows: [{"row": (row, 1)} for row in rows]]
)
@pytest.mark.parametrize("pad", [None, {}])
def test_a_row_that_is_kept_does_not_keep_its_batch_alive(make: Any, answer: Any, pad: Any) -> None:
    # The array is a view itself: what counts is the memory behind it.
    def compute(items: Any) -> Any:
        return answer(make((3, 4, 9))[:, :, 0])

    with batching(compute, **({} if pad is None else {"pad": pad})) as function:
        kept, *_ = function([{"x": 1}] * 3)
    if isinstance(kept, dict):
        assert kept["row"][1] == 1
        kept = kept["row"][0]
    assert kept.tolist() == [1.0] * 4
    behind = kept.base if make is np.ones else kept.untyped_storage()
    assert behind is None or behind.nbytes == kept.nbytes or behind.nbytes() == kept.nbytes


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_a_row_of_half_of_its_batch_is_no_copy(make: Any) -> None:
    whole = make((2, 4))
    with batching(lambda _: whole) as function:
        results = function(["a", "b"])
    whole[:] = 7
    assert [row.tolist() for row in results] == [[7.0] * 4] * 2


WRONG_ANSWERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too few rows": (lambda x: x[:-1], r"the shape \[1, 2\]; its first dimension must be the 2 it"),
    "too many rows": (lambda x: {"out": (x, x.repeat(2, 0))}, r"\['out'\]\[1\] .* \[4, 2\];"),
    "no rows": (lambda x: x.sum(), r"the shape \[\];"),
    "too few outcomes": (lambda x: [x[0]], "returned 1 outcome for 2 items"),
    "list of outputs": (lambda x: [x, x, x], "returned 3 outcomes for 2 items"),
    "no array": (lambda x: (x, None), r"the output\[1\] is of the type NoneType"),
    "nothing": (lambda _: None, "returned a NoneType for 2 items"),
    "no outputs": (lambda _: {}, "the output is empty"),
}


@pytest.mark.parametrize("way", WRONG_ANSWERS)
def test_wrong_number_of_rows_is_named(way: str) -> None:
    answer, text = WRONG_ANSWERS[way]
    with (
        batching(lambda batch: answer(batch["ids"]), pad={"ids": 0}) as function,
        pytest.raises(WrongLength, match=text),
    ):
        function([{"ids": [1, 2]}, {"ids": [1]}])


def test_trim_needs_the_tokens_of_the_batch() -> None:
    with batching(lambda batch: batch["ids"][:, :-1], pad={"ids": 0}, trim=True) as function:
        text = r"shape \[2, 1\].* its second one the 2 tokens"
        with pytest.raises(WrongLength, match=text):
            function([{"ids": [1, 2]}, {"ids": [1]}])


# What is refused.

WRONG_ITEMS: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], r"an item is \[1, 2\]; give a dict"),
    "nothing": ({}, "an item is {}"),
    "no padded feature": ({"x": [1]}, "features x, and none that is padded: ids, types, no, max"),
    "mask only": ({"mask": [1]}, "none that is padded"),
    "lengths differ": ({"ids": [1, 2], "types": [1]}, r"types has the shape \[1\].* must be 2 tok"),
    "mask differs": ({"ids": [1, 2], "mask": [1]}, r"mask has the shape \[1\]"),
    "scalar": ({"ids": 3}, r"ids has the shape \[\]; its first dimension must be one or more tok"),
    "empty tensor": ({"ids": torch.ones(0, 4)}, r"ids has the shape \[0, 4\]"),
    "text": ({"ids": "abc"}, "ids is no array of numbers, but of <U3"),
    "ragged": ({"ids": [[1], [2, 3]]}, "ids is no array of numbers"),
    "none": ({"ids": None}, "ids is no array of numbers, but of object"),
    "no name": ({"ids": [1], 3: [1]}, "feature 3: the name of a feature is a text"),
    "cannot hold": ({"types": np.ones(2, dtype=np.uint8)}, "types is uint8, and cannot be padded"),
    "nan": ({"no": np.ones(2, dtype=np.int8)}, "no is int8, and cannot be padded with nan"),
    "too large": ({"max": torch.ones(2, dtype=torch.int64)}, "max is torch.int64, and cannot"),
    "tensor cannot hold": ({"types": torch.ones(2, dtype=torch.bool)}, "types is torch.bool"),
}


@pytest.mark.parametrize("what", WRONG_ITEMS)
def test_wrong_item_is_refused_in_its_caller_s_thread(what: str) -> None:
    item, text = WRONG_ITEMS[what]
    fill = {**PAD, "no": float("nan"), "max": 2**63 - 1}
    with batching(len, pad=fill, mask="mask") as function:
        with pytest.raises(InvalidItem, match=text):
            function.submit(item)
        assert function.stats.batches == 0


def test_wrong_item_of_a_list_is_named_and_none_runs() -> None:
    with batching(lambda batch: batch["ids"], pad={"ids": 0}) as function:
        with pytest.raises(InvalidItem, match=r"items\[1\]: feature ids has the shape \[0\]"):
            function([{"ids": [1]}, {"ids": []}])
        assert function.stats.batches == 0


def test_others_of_a_list_run_where_exceptions_are_returned() -> None:
    with batching(lambda batch: batch["ids"], pad={"ids": 0}, max_waiting=2) as function:
        wanted = function.options(return_exceptions=True, timeout_s=60)
        for _ in range(3):  # No space is lost.
            seen = wanted([{"ids": []}, {"ids": [1]}, None, {"ids": [2, 3]}])
            assert [isinstance(each, InvalidItem) for each in seen] == [True, False, True, False]
            assert [plain(each) for each in (seen[1], seen[3])] == [[1, 0], [2, 3]]
        assert all(isinstance(each, InvalidItem) for each in wanted([None, {"ids": []}]))
        future = wanted.submit_many([None])
        assert isinstance(future.result(60)[0], InvalidItem)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pad": ["ids"]}, "pad="),
        ({"pad": {"ids": "0"}}, "pad="),
        ({"pad": {"ids": 0, "mask": 1}, "mask": "mask"}, "mask='mask'"),
        ({"mask": "mask"}, "need pad"),
        ({"trim": True}, "need pad"),
        ({"pad": {}, "max_batch_tokens": 10}, "max_batch_tokens needs length"),
    ],
)
def test_impossible_option_is_refused_where_it_is_written(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(BatchArgumentError, match=text):
        batched(**options)


# Who shares a batch.


def shapes_of_batches(*items: Mapping[str, Any], **options: Any) -> list[tuple[int, ...]]:
    """The shapes of the calls of a function that gets all these items at once."""
    seen: list[tuple[int, ...]] = []

    def compute(batch: dict[str, Any]) -> Any:
        first = next(iter(batch.values()))
        seen.append(tuple(first.shape))
        return first

    with batching(compute, pad={"ids": 0}, **options) as function:
        results = function(list(items))
    for item, result in zip(items, results, strict=True):
        own = plain(np.asarray(item["ids"]))
        assert plain(result)[: len(own)] == own, "each caller has its own"
    return sorted(seen)


def test_items_that_cannot_be_stacked_have_batches_of_their_own() -> None:
    ids = [1, 2]
    items: list[dict[str, Any]] = [
        {"ids": ids},
        {"ids": np.array(ids, dtype=np.int32)},
        {"ids": torch.tensor(ids)},
        {"ids": ids, "x": [1.0]},
        {"ids": ids, "x": [1.0, 2.0]},
        {"ids": [[1], [2]]},
    ]
    assert len(shapes_of_batches(*items)) == len(items)
    assert shapes_of_batches(*items, *items) == sorted([(2, 2, 1), *[(2, 2)] * 5])


def test_padding_is_counted() -> None:
    with batching(lambda batch: batch["ids"], pad={"ids": 0}) as function:
        function([{"ids": [1, 2, 3]}, {"ids": [1]}])
        assert function.stats.padding_waste == pytest.approx(2 / 6)
