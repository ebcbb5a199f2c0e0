"""Which jobs of `map` and `starmap` become jobs of a batch task; the real ones are elsewhere."""

from typing import Any

import pytest

from batchery_worker.map_strategy import _read_arguments


@pytest.mark.parametrize("elements", [[["a"], ["b"]], [("a",), ("b",)], ["a", "b"]])
def test_each_element_of_a_starmap_has_one_item(elements: list[Any]) -> None:
    expected = [["a", "b"]], {"n": 2, "values": True}
    assert _read_arguments(elements, is_starred=True) == expected


def test_elements_of_a_map_are_items() -> None:
    elements = [["a"], "bc", None]
    expected = [elements], {"n": 3, "values": True}
    assert _read_arguments(elements, is_starred=False) == expected


@pytest.mark.parametrize("odd", [[], ["b", "c"], ("b", "c")])
def test_arguments_that_are_not_one_item_are_left_for_the_task_to_refuse(odd: Any) -> None:
    assert _read_arguments([["a"], odd], is_starred=True) == (list(odd), {})
