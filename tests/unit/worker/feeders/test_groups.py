"""Which requests share the card, and how a batch is cut into slots."""

from collections import deque
from typing import Any, cast

import numpy as np
import pytest

from batchery import Failed
from batchery_worker.feeders.card_process import Asked, Feeder, take_group
from batchery_worker.feeders.memory import MAX_TEXTS, Request, SharedRows
from batchery_worker.feeders.runner import cut_parts


class Ends:
    """As the memory of a feeder, with one text of so many tokens in slot 0."""

    def __init__(self, tokens: int) -> None:
        self.ends = np.array([[0, tokens]])


def ask(
    tokens: int = 10, keywords: Any = None, *, urgent: bool = False, alone: bool = False
) -> Asked:
    request = Request(0, 1, 64, None, keywords or {}, urgent, alone)
    return Asked(cast(Feeder, None), cast(SharedRows, Ends(tokens)), request, ())


def take(*asked: Asked, max_tokens: int = 100) -> tuple[list[int], list[int]]:
    """Places of those that run next, and of those that are left."""
    waiting = deque(asked)
    taken = take_group(waiting, max_tokens)
    places = {id(each): place for place, each in enumerate(asked)}
    return [places[id(each)] for each in taken], [places[id(each)] for each in waiting]


def test_requests_of_all_feeders_run_together_up_to_the_tokens_of_some_passes() -> None:
    assert take(ask(40), ask(40), ask(40)) == ([0, 1], [2])
    assert take(ask(400), ask(40)) == ([0], [1])


def test_only_requests_with_the_same_keywords_run_together() -> None:
    assert take(ask(), ask(keywords={"normalize": False}), ask()) == ([0, 2], [1])


def test_what_is_urgent_goes_first_and_by_itself() -> None:
    assert take(ask(), ask(), ask(urgent=True), ask(urgent=True)) == ([2, 3], [0, 1])


def test_a_suspect_has_the_card_to_itself_in_its_turn() -> None:
    assert take(ask(), ask(alone=True), ask()) == ([0, 2], [1])
    assert take(ask(alone=True), ask(), ask(alone=True)) == ([0], [1, 2])


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([5, 5, 5], [[0, 1], [2]]),
        ([10, 1, 10], [[0], [1], [2]]),
        ([3, None, 3], [[0, 2]]),
        ([None], []),
        ([], []),
    ],
)
def test_parts_fit_into_slots(lengths: list[int | None], parts: list[list[int]]) -> None:
    items = [
        Failed("no") if length is None else np.zeros((2, length), np.int64) for length in lengths
    ]
    assert cut_parts(items, 10) == parts


def test_a_slot_has_room_for_so_many_texts() -> None:
    items = [np.zeros((2, 1), np.int64)] * (MAX_TEXTS + 1)
    assert list(map(len, cut_parts(items, 10**6))) == [MAX_TEXTS, 1]
