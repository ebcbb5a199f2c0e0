"""What batches of each task cost: before the first, after one, and after many."""

import random

import pytest

from batchery_worker.batching.cost_model import REFRESH_BATCHES, UNKNOWN_ITEM_S, TaskCosts

#: Device time of a batch besides its items, and of each item.
BATCH_S, ITEM_S = 0.02, 0.003


def run_many(costs: TaskCosts, task: str = "embed", batches: int = 200) -> None:
    draw = random.Random(1)
    for _ in range(batches):
        items = draw.randint(1, 64)
        costs.ran(task, items, (BATCH_S + ITEM_S * items) * draw.uniform(0.9, 1.1))


def test_nothing_is_known_of_a_task_that_never_ran() -> None:
    costs = TaskCosts()
    costs.ran("label", 8, 0.1)
    assert costs.expected_s("embed", 8) == 8 * UNKNOWN_ITEM_S
    assert costs.max_items("embed", 1.0, cap=64) is None
    assert not costs.is_believable("embed")
    assert costs.figures() == {}


def test_one_batch_is_enough_for_an_estimate_and_not_for_trust() -> None:
    costs = TaskCosts()
    costs.ran("embed", 8, 0.09)
    assert costs.expected_s("embed", 8) == pytest.approx(0.09)
    assert costs.expected_s("embed", 17) == pytest.approx(0.18)
    assert costs.max_items("embed", 0.185, cap=64) == 17
    assert costs.max_items("embed", 0.185, cap=4) == 4
    assert costs.max_items("embed", 0.015, cap=64) == 0
    assert not costs.is_believable("embed")


def test_batch_and_items_are_told_apart() -> None:
    costs = TaskCosts()
    run_many(costs)
    for items in (1, 10, 64):
        assert costs.expected_s("embed", items) == pytest.approx(BATCH_S + ITEM_S * items, rel=0.05)
    assert costs.is_believable("embed")
    figures = costs.figures()["embed"]
    assert figures["item_us"] == pytest.approx(ITEM_S * 1e6, rel=0.05)
    assert figures["pass_ms"] == pytest.approx(BATCH_S * 1e3, rel=0.05)
    assert figures["error"] < 0.1
    assert figures["batches"] == 199 // REFRESH_BATCHES * REFRESH_BATCHES


def test_tasks_know_nothing_of_each_other() -> None:
    costs = TaskCosts()
    run_many(costs)
    costs.ran("label", 64, 0.001)
    assert costs.is_believable("embed")
    assert not costs.is_believable("label")
    assert costs.expected_s("embed", 64) > 0.1
    assert costs.expected_s("label", 64) == pytest.approx(0.001)


def test_devices_of_different_speed_count_as_one_in_between() -> None:
    costs = TaskCosts()
    for number in range(200):
        costs.ran("embed", 9, 1 + number % 2)
    assert 1 < costs.expected_s("embed", 9) < 2
