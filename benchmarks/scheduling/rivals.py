"""What others do, each by its published rule. Pure.

They keep jobs in the order in which they came, and give a batch only to an idle device.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from statistics import fmean, linear_regression

from batchery_worker.job import Batch
from benchmarks.scheduling.virtual import VirtualBatch, VirtualJob


class Rival:
    """Fixed size and timeout: the dynamic batchers of NVIDIA's Triton and of TorchServe.

    A batch leaves when it is full or when its oldest job has waited so long, even while a device is
    idle.
    """

    def __init__(self, max_batch_size: int, timeout_s: float = 0.0) -> None:
        """Holds no jobs."""
        self.max_batch_size = max_batch_size
        self.timeout_s = timeout_s
        self.jobs: deque[VirtualJob] = deque()
        self.given_up: list[VirtualJob] = []
        self._sent_s: dict[int, float] = {}

    @property
    def items(self) -> int:
        """How many wait, counted no further than to a full batch."""
        return sum(job.items for job in islice(self.jobs, self.max_batch_size))

    def admit(self, job: VirtualJob) -> None:
        """Takes a job in."""
        self.jobs.append(job)

    def next_batch(
        self,
        in_flight: int,
        alone: bool,
        now_s: float,
        behind: Sequence[VirtualBatch] = (),
        left_s: float = 0.0,
    ) -> VirtualBatch | None:
        """The batch that a device should get now; none for a busy one."""
        self.give_up(in_flight, now_s)
        if in_flight or not self.jobs:
            return None
        if now_s < self.due_s() and self.items < self.size:
            return None
        batch = Batch(tuple(self.take()))
        self._sent_s[id(batch)] = now_s
        return batch

    def ended(self, batch: VirtualBatch, run_s: float | None) -> None:
        """Notes that a batch is back."""
        assert run_s is not None
        self.learn(batch, self._sent_s.pop(id(batch)), run_s)

    def wake_s(self) -> float | None:
        """When an idle device should ask again although nothing else happened."""
        return self.due_s() if self.jobs else None

    def take_late(self, now_s: float) -> list[VirtualJob]:
        """The jobs that were given up since the last call."""
        late, self.given_up = self.given_up, []
        return late

    # What others do in another way

    @property
    def size(self) -> int:
        """Items at which a batch waits no longer, and its maximum."""
        return self.max_batch_size

    def due_s(self) -> float:
        """When a batch leaves that has fewer items; some job must wait."""
        return self.jobs[0].arrived_s + self.timeout_s

    def take(self) -> list[VirtualJob]:
        """The jobs of the next batch, which wait no longer."""
        taken = [self.jobs.popleft()]
        items = taken[0].items
        while self.jobs and items + self.jobs[0].items <= self.size:
            taken.append(self.jobs.popleft())
            items += taken[-1].items
        return taken

    def give_up(self, in_flight: int, now_s: float) -> None:
        """Gives up jobs that would be too late: by default, none."""

    def learn(self, batch: VirtualBatch, sent_s: float, run_s: float) -> None:
        """Learns from a batch that is back: by default, nothing."""


class Clipper(Rival):
    """Additive increase, multiplicative decrease of the batch size.

    While full batches run within the target, the size grows by one; when one takes longer, it is
    cut by a tenth. An idle device takes what is there. That only a full batch lets the size grow is
    our reading.

    D. Crankshaw et al.: Clipper, a Low-Latency Online Prediction Serving System, NSDI 2017, 4.3.1.
    """

    def __init__(self, max_batch_size: int, target_s: float) -> None:
        """Begins with batches of one."""
        super().__init__(max_batch_size)
        self._target_s = target_s
        self._size = 1.0

    @property
    def size(self) -> int:
        """The present size."""
        return int(self._size)

    def learn(self, batch: VirtualBatch, sent_s: float, run_s: float) -> None:
        """Adapts the size."""
        if run_s > self._target_s:
            self._size = max(1.0, self._size * 0.9)
        elif batch.items >= self.size:
            self._size = min(float(self.max_batch_size), self._size + 1)


class Bento(Rival):
    """The adaptive dispatcher of BentoML 1.4, `bentoml/_internal/marshal/dispatcher.py`.

    It believes that n items take `a * n + b` seconds, by least squares over the last 50 batches. It
    waits for another job while that costs those that wait less than a batch usually waits. Jobs
    whose expected latency is beyond the maximum are given up. At first it only learns. BentoML has
    a queue for each worker process; here each device counts its part of one queue as its own.
    """

    #: Number of first batches that never count, and of those that only teach.
    SKIPPED, LESSONS = 2, 11

    #: How often the line is drawn anew, how often it looks, in seconds; how much of a usual wait
    #: it allows.
    REFRESH_S, TICK_S, DECAY = 5.0, 0.001, 0.95

    def __init__(self, max_batch_size: int, max_latency_s: float, devices: int) -> None:
        """Knows nothing of how long batches take."""
        super().__init__(max_batch_size)
        self._max_latency_s, self._devices = max_latency_s, devices
        self._item_s = self._batch_s = self._usual_wait_s = 0.0
        self._seen, self._drawn_s = 0, -inf
        #: Items, run and wait of the last batches.
        self._rows: deque[tuple[int, float, float]] = deque(maxlen=50)

    def due_s(self) -> float:
        """When to wait longer costs more than a batch usually waits."""
        count = max(1.0, len(self.jobs) / self._devices)
        patience_s = self._usual_wait_s * self.DECAY / count - self._item_s - self.TICK_S
        return self.jobs[-1].arrived_s + max(0.0, patience_s)

    def give_up(self, in_flight: int, now_s: float) -> None:
        """Gives up the oldest jobs while they are expected to take too long."""
        while self.jobs:
            wait_s = now_s - self.jobs[0].arrived_s
            if len(self.jobs) == 1:
                is_late = in_flight > 0 and wait_s >= self._max_latency_s
            else:
                count = max(1.0, len(self.jobs) / self._devices)
                expected_s = self._item_s * count + self._batch_s
                is_late = wait_s + expected_s >= self._max_latency_s
            if not is_late:
                return
            self.given_up.append(self.jobs.popleft())

    def learn(self, batch: VirtualBatch, sent_s: float, run_s: float) -> None:
        """Draws the line anew, if it is old."""
        self._seen += 1
        if self._seen <= self.SKIPPED:
            return
        is_lesson = self._seen <= self.LESSONS
        wait_s = 0.0 if is_lesson else sent_s - batch.jobs[0].arrived_s
        self._rows.append((batch.items, run_s, wait_s))
        is_old = not is_lesson and sent_s + run_s >= self._drawn_s + self.REFRESH_S
        if self._seen == self.LESSONS or is_old:
            self._drawn_s = sent_s + run_s
            items, runs_s, waits_s = zip(*self._rows, strict=True)
            if len(set(items)) > 1:
                self._item_s, self._batch_s = linear_regression(items, runs_s)
                self._item_s, self._batch_s = max(1e-6, self._item_s), max(0.0, self._batch_s)
            self._usual_wait_s = fmean(waits_s)


class Priority(Rival):
    """Half of a batch for the first class, 30 % for the second: a common hand-made scheme.

    What a class leaves goes to the others, highest first. Size and timeout are fixed.
    """

    PARTS = (0.5, 0.3)

    def __init__(self, max_batch_size: int, timeout_s: float, classes: Sequence[str]) -> None:
        """Holds no jobs; classes are highest first."""
        super().__init__(max_batch_size, timeout_s)
        self._classes = classes

    def take(self) -> list[VirtualJob]:
        """The parts of the classes, then what is left."""
        queues = [
            deque(job for job in self.jobs if job.lane.priority_class == name)
            for name in self._classes
        ]
        taken: list[VirtualJob] = []
        room = self.size

        def fill(queue: deque[VirtualJob], part: int) -> None:
            nonlocal room
            while queue and (
                queue[0].items <= min(part, room) or (not taken and part == self.size)
            ):
                taken.append(queue.popleft())
                room -= taken[-1].items
                part -= taken[-1].items

        for queue, share in zip(queues, self.PARTS, strict=False):
            fill(queue, int(share * self.size))
        for queue in (*queues[len(self.PARTS) :], *queues[: len(self.PARTS)]):
            fill(queue, self.size)
        gone = set(map(id, taken))
        self.jobs = deque(job for job in self.jobs if id(job) not in gone)
        return taken
