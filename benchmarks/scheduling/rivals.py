"""More policies for `batchery simulate`, each by its published rule.

    python -m benchmarks.scheduling.rivals --workload day --policies all

takes the options of `batchery simulate`, and knows these besides:

    aimd      Clipper: the size grows, and is cut when a batch was late
    bento     BentoML: waits while it is worth it; gives up what would be late
    adaptive  the size follows the time that the last batches took
    priority  50, 30 and 20 % of a batch for the classes

They keep jobs in the order in which they came, and give a batch only to an idle device. They learn
one size of a task for all devices. Jobs of a device that died run alone, as in the worker.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from batchery_worker.cli.simulate import POLICIES, Plan, simulate
from batchery_worker.simulator.policies import (
    FixedBatcher,
    KeyQueue,
    Policy,
    SimulatedBatch,
    SimulatedJob,
)


class Rival(FixedBatcher):
    """What all rivals share: the fixed batcher, which can learn, and give up jobs."""

    def __init__(self, max_batch_size: int, timeout_s: float = 0.0) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Maximum number of items in a batch.
            timeout_s: How long its oldest job waits for others.
        """
        super().__init__(max_batch_size, timeout_s)
        self._shed: list[SimulatedJob] = []
        #: When a batch left, by its identity: results do not say it.
        self._sent_s: dict[int, float] = {}

    def next_batch(
        self, in_flight: int, alone: bool, now_s: float, *more: Any, **others: Any
    ) -> SimulatedBatch | None:
        """The batch that a device should get now; None unless it is idle."""
        self.give_up(in_flight, now_s)
        batch = super().next_batch(in_flight, alone, now_s, *more, **others)
        if batch is not None:
            self._sent_s[id(batch)] = now_s
        return batch

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for the time if its device died."""
        sent_s = self._sent_s.pop(id(batch))
        if run_s is not None and not batch.alone:
            self.learn(batch, sent_s, run_s)

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that were given up since the last call."""
        shed, self._shed = self._shed, []
        return shed

    @property
    def oldest_s(self) -> float:
        """When the oldest waiting job came; suspects go before all others. There must be one."""
        if self._suspects:
            return -math.inf
        return min(queue.oldest_s for queue in self._queues.values() if queue)

    def give_up(self, in_flight: int, now_s: float) -> None:
        """Gives up jobs that would be too late: by default, none."""

    def learn(self, batch: SimulatedBatch, sent_s: float, run_s: float) -> None:
        """Learns from a batch that is back: by default, nothing."""


class ClassedQueue(KeyQueue):
    """The waiting jobs of one key, by class."""

    def __init__(self, classes: Sequence[str]) -> None:
        super().__init__()
        self._classes = {name: KeyQueue() for name in classes}

    def __len__(self) -> int:
        """Number of jobs."""
        return sum(map(len, self._classes.values()))

    @property
    def oldest_s(self) -> float:
        """When the oldest job came; there must be one."""
        return min(each.oldest_s for each in self._classes.values() if each)

    def append(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        self._classes[job.lane.priority_class].append(job)
        self.items += job.items

    def take_parts(self, parts: Sequence[float], max_items: int) -> list[SimulatedJob]:
        """Gives out up to so many items, by the parts of the first classes; at least one job."""
        taken: list[SimulatedJob] = []
        room = max_items
        for part, queue in zip(parts, self._classes.values(), strict=False):
            own = queue.take(min(room, int(part * max_items)), at_least_one=False)
            room -= sum(job.items for job in own)
            taken += own
        # What the first classes left is for the others, then for the first ones again.
        queues = list(self._classes.values())
        for queue in (*queues[len(parts) :], *queues[: len(parts)]):
            more = queue.take(room, at_least_one=not taken)
            room -= sum(job.items for job in more)
            taken += more
        self.items -= sum(job.items for job in taken)
        return taken


class AimdRival(Rival):
    """The batch size of Clipper: additive increase, multiplicative decrease.

    While full batches run within the target, the size grows by a step; when one takes longer, it is
    cut by a tenth. An idle device takes what is there. Clipper has a queue and a size for each
    replica of a model; here all replicas share one. That only a full batch lets the size grow is
    our reading, as others say nothing about it.

    D. Crankshaw et al.: Clipper, a Low-Latency Online Prediction Serving System, NSDI 2017, 4.3.1.
    """

    #: Items by which the size grows.
    STEP = 1

    #: What is left of the size when a batch took too long.
    CUT = 0.9

    def __init__(self, max_batch_size: int, target_s: float) -> None:
        """Holds no jobs, and begins with batches of one.

        Args:
            max_batch_size: Bound of the size.
            target_s: How long a batch may take.
        """
        super().__init__(max_batch_size)
        self._target_s = target_s
        self._size = 1.0

    @property
    def size(self) -> int:
        """The present size."""
        return int(self._size)

    def learn(self, batch: SimulatedBatch, sent_s: float, run_s: float) -> None:
        """Adapts the size."""
        if run_s > self._target_s:
            self._size = max(1.0, self._size * self.CUT)
        elif batch.items >= self.size:
            self._size = min(float(self.max_batch_size), self._size + self.STEP)


class BentoRival(Rival):
    """The adaptive dispatcher of BentoML.

    It believes that n items take `a * n + b` seconds, by least squares over the last batches. It
    waits for another job while that costs those that wait less than a batch usually waits. Jobs
    whose expected latency is beyond the maximum are given up; their users get an error 503. At
    first it only learns: then it neither waits nor expects anything.

    BentoML has a queue for each worker process. Here all devices share one, and each counts its
    part of it as its own queue. A job is never divided.

    BentoML 1.4, `bentoml/_internal/marshal/dispatcher.py`; its documentation, "Adaptive batching".
    """

    #: Number of batches that count, of the first ones that never do, and of those that only teach.
    BATCHES = 50
    SKIPPED = 2
    LESSONS = 11

    #: How long the line is kept, in seconds.
    REFRESH_S = 5.0

    #: How often it looks, in seconds, and how much of a usual wait it allows.
    TICK_S = 0.001
    DECAY = 0.95

    def __init__(self, max_batch_size: int, max_latency_s: float, devices: int = 1) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Maximum number of items in a batch.
            max_latency_s: Latency beyond which a job is given up.
            devices: How many there are.
        """
        super().__init__(max_batch_size)
        self._max_latency_s = max_latency_s
        self._devices = devices
        self._item_s = self._batch_s = self._usual_wait_s = 0.0
        self._seen = 0
        self._refreshed_s = -math.inf
        #: Items, run and wait of the last batches.
        self._rows: deque[tuple[int, float, float]] = deque(maxlen=self.BATCHES)

    def due_s(self, queue: KeyQueue) -> float:
        """When to wait longer costs more than a batch usually waits."""
        count = max(1.0, len(queue) / self._devices)
        patience_s = self._usual_wait_s * self.DECAY / count - self._item_s - self.TICK_S
        return queue.jobs[-1].arrived_s + max(0.0, patience_s)

    def give_up(self, in_flight: int, now_s: float) -> None:
        """Gives up the oldest jobs while they are expected to take too long."""
        for queue in self._queues.values():
            while queue:
                wait_s = now_s - queue.oldest_s
                if len(queue) == 1:
                    too_late = in_flight and wait_s >= self._max_latency_s
                else:
                    count = max(1.0, len(queue) / self._devices)
                    expected_s = self._item_s * count + self._batch_s
                    too_late = wait_s + expected_s >= self._max_latency_s
                if not too_late:
                    break
                self._shed += queue.take(1)

    def learn(self, batch: SimulatedBatch, sent_s: float, run_s: float) -> None:
        """Draws the line anew, if it is old."""
        self._seen += 1
        if self._seen <= self.SKIPPED:
            return
        is_lesson = self._seen <= self.LESSONS
        wait_s = 0.0 if is_lesson else sent_s - batch.jobs[0].arrived_s
        self._rows.append((batch.items, run_s, wait_s))
        now_s = sent_s + run_s
        if self._seen == self.LESSONS or (
            not is_lesson and now_s >= self._refreshed_s + self.REFRESH_S
        ):
            self._refreshed_s = now_s
            slope_s, base_s = fitted_line([(items, seconds) for items, seconds, _ in self._rows])
            self._item_s, self._batch_s = max(1e-6, slope_s), max(0.0, base_s)
            self._usual_wait_s = fmean(wait_s for *_, wait_s in self._rows)


def fitted_line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope and base of the line with the least squares; the smallest two if many lines fit."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        base = mean_y / (mean_x**2 + 1)
        return base * mean_x, base
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return slope, mean_y - slope * mean_x


class AdaptiveRival(Rival):
    """A batch size that follows the latency of late: a rule of thumb in many hand-made batchers.

    Where the last batches ran for less than 0.8 of the target on average, the size grows by a
    quarter; where they ran for more than 1.2 of it, it shrinks by a fifth. A smaller batch leaves
    after a timeout. We know of no paper behind it; the step sizes are our choice. It is the time
    on the device that counts: with the time in the queue, a size that is too small for the load
    would shrink even more, down to one.
    """

    #: Share of the target below which the size grows, and above which it shrinks.
    GROWS_BELOW = 0.8
    SHRINKS_ABOVE = 1.2

    #: What the size is multiplied with.
    GROWTH = 1.25
    SHRINKAGE = 0.8

    #: Number of batches from one decision to the next.
    BATCHES = 10

    #: Size at the start, in items.
    FIRST_SIZE = 8

    def __init__(self, max_batch_size: int, timeout_s: float, target_s: float) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Bound of the size.
            timeout_s: How long the oldest job waits for others.
            target_s: Wanted latency.
        """
        super().__init__(max_batch_size, timeout_s)
        self._target_s = target_s
        self._size = float(min(self.FIRST_SIZE, max_batch_size))
        self._runs_s: list[float] = []

    @property
    def size(self) -> int:
        """The present size."""
        return int(self._size)

    def learn(self, batch: SimulatedBatch, sent_s: float, run_s: float) -> None:
        """Adapts the size after every few batches."""
        self._runs_s.append(run_s)
        if len(self._runs_s) < self.BATCHES:
            return
        mean_s = fmean(self._runs_s)
        self._runs_s.clear()
        if mean_s < self.GROWS_BELOW * self._target_s:
            self._size = min(float(self.max_batch_size), self._size * self.GROWTH)
        elif mean_s > self.SHRINKS_ABOVE * self._target_s:
            self._size = max(1.0, self._size * self.SHRINKAGE)


class PriorityRival(Rival):
    """Fixed parts of each batch for three priorities: a common hand-made scheme, of no paper.

    Half of a batch is for the first class, 30 % for the second one, the rest for the third. What a
    class leaves goes to the others, highest first. Size and timeout are fixed.
    """

    #: Parts of the classes, highest first; classes beyond them have what is left.
    PARTS = (0.5, 0.3)

    def __init__(self, max_batch_size: int, timeout_s: float, classes: Sequence[str]) -> None:
        """Holds no jobs.

        Args:
            max_batch_size: Number of items at which a batch leaves.
            timeout_s: How long the oldest job waits for others.
            classes: Names of the priority classes, highest first.
        """
        super().__init__(max_batch_size, timeout_s)
        self._classes = classes

    def make_queue(self) -> KeyQueue:
        """A queue of each class."""
        return ClassedQueue(self._classes)

    def take(self, queue: KeyQueue) -> Sequence[SimulatedJob]:
        """The parts of the classes, then what is left."""
        assert isinstance(queue, ClassedQueue)
        return queue.take_parts(self.PARTS, self.max_batch_size)


class RivalByTask(Policy):
    """One rival for each task, as each of them has its own model, queue and costs."""

    def __init__(self, make: Callable[[], Rival]) -> None:
        """Holds no jobs; `make` makes the rival of a task."""
        self._make = make
        self._rivals: dict[str, Rival] = {}

    def __len__(self) -> int:
        """How many jobs wait."""
        return sum(map(len, self._rivals.values()))

    def admit(self, job: SimulatedJob) -> None:
        """Takes a job in."""
        rival = self._rivals.get(job.key.task)
        if rival is None:
            rival = self._rivals[job.key.task] = self._make()
        rival.admit(job)

    def quarantine(self, job: SimulatedJob) -> None:
        """Takes back a job that was on a device which died; it runs alone."""
        self._rivals[job.key.task].quarantine(job)

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        elsewhere: int = 0,
        behind: Sequence[SimulatedBatch] = (),
        left_s: float = 0.0,
    ) -> SimulatedBatch | None:
        """The batch of the task whose job has waited longest, among those that give one."""
        waiting = [rival for rival in self._rivals.values() if len(rival)]
        waiting.sort(key=lambda rival: rival.oldest_s)
        batches = (rival.next_batch(in_flight, alone, now_s) for rival in waiting)
        return next((batch for batch in batches if batch is not None), None)

    def progress(self, batch: SimulatedBatch, had_s: float, slots: int) -> None:
        """Charges nobody."""

    def ended(self, batch: SimulatedBatch, run_s: float | None) -> None:
        """Notes that a batch is back; None for the time if its device died."""
        self._rivals[batch.jobs[0].key.task].ended(batch, run_s)

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""
        times_s = (rival.wake_s() for rival in self._rivals.values())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def take_late(self, now_s: float) -> list[SimulatedJob]:
        """The jobs that were given up since the last call."""
        return [job for rival in self._rivals.values() for job in rival.take_late(now_s)]


#: Name -> makes the policy, fresh.
RIVALS: Mapping[str, Callable[[Plan], Policy]] = {
    "aimd": lambda plan: RivalByTask(partial(AimdRival, plan.max_batch_size, plan.target_s)),
    "bento": lambda plan: RivalByTask(
        partial(BentoRival, plan.max_batch_size, plan.target_s, plan.fleet.count)
    ),
    "adaptive": lambda plan: RivalByTask(
        partial(AdaptiveRival, plan.max_batch_size, plan.timeout_s, plan.target_s)
    ),
    "priority": lambda plan: RivalByTask(
        partial(PriorityRival, plan.max_batch_size, plan.timeout_s, [*plan.shares])
    ),
}


if __name__ == "__main__":
    POLICIES.update(RIVALS)
    simulate()
