"""How many threads of torch steps have."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from batchery_worker.models.hardware.cpu_threads import (
    FIRST_STEPS,
    STEPS_BETWEEN,
    TRIAL_STEPS,
    StepThreads,
)


class Machine:
    """Steps that last as long as it is told, by their threads; on a clock of its own."""

    def __init__(self, most: int, lasts_s: Callable[[int], float]) -> None:
        self.now_s = 0.0
        self.lasts_s = lasts_s
        self.threads = StepThreads(most, lambda: self.now_s)

    def run(self, steps: int) -> Counter[int]:
        """Runs steps; how many of them had how many threads."""
        had: Counter[int] = Counter()
        for _ in range(steps):
            with self.threads.step() as count:
                self.now_s += self.lasts_s(count)
                had[count] += 1
        return had


def crowded(threads: int) -> float:
    """Each thread more makes a step longer."""
    return 1.0 + 0.2 * threads


def parallel(threads: int) -> float:
    """Twice the threads take half the time."""
    return 8.0 / threads


@pytest.mark.parametrize("most", [2, 8, 12])
def test_finds_one_thread_where_more_only_wait(most: int) -> None:
    machine = Machine(most, crowded)
    machine.run(10 * (FIRST_STEPS + TRIAL_STEPS))
    assert machine.threads.count == 1


def test_keeps_all_threads_where_they_share_the_work_and_hardly_tries() -> None:
    machine = Machine(8, parallel)
    steps = 10 * (STEPS_BETWEEN + TRIAL_STEPS)
    had = machine.run(steps)
    assert machine.threads.count == 8
    assert set(had) == {8, 4}
    assert had[4] < 0.02 * steps


def test_finds_a_number_between() -> None:
    machine = Machine(16, lambda threads: 1 / threads + 0.05 * threads)
    machine.run(20 * (STEPS_BETWEEN + TRIAL_STEPS))
    assert machine.threads.count == 4


def test_goes_back_when_the_cores_are_free_again() -> None:
    machine = Machine(2, crowded)
    machine.run(FIRST_STEPS + TRIAL_STEPS)
    assert machine.threads.count == 1
    machine.lasts_s = parallel
    machine.run(2 * (STEPS_BETWEEN + TRIAL_STEPS))
    assert machine.threads.count == 2


def test_torch_has_the_threads_of_a_step_only_within_it() -> None:
    threads, seen = StepThreads(2), set()
    for _ in range(FIRST_STEPS + TRIAL_STEPS):
        with threads.step() as count:
            assert torch.get_num_threads() == count
            seen.add(count)
        assert torch.get_num_threads() == 2
    assert seen == {1, 2}


def test_a_step_that_fails_is_not_counted() -> None:
    machine = Machine(2, crowded)
    for _ in range(3 * FIRST_STEPS):
        with pytest.raises(MemoryError), machine.threads.step() as count:
            raise MemoryError
        assert count == 2
    machine.run(FIRST_STEPS + TRIAL_STEPS)
    assert machine.threads.count == 1
