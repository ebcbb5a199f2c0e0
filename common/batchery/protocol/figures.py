"""What a worker answers over remote control: its figures. Pure.

The worker counts in these classes, and whoever asks reads its answer into them. Ratios are worked
out here alone.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Self, cast

from pydantic import TypeAdapter, ValidationError

from batchery.redis_scripts import ScriptTime

#: The state of a device that failed to start too often, as its worker reports it.
GIVEN_UP = "given up"

#: Digits of what is reported behind the point.
DIGITS = 3

#: Upper bounds of the batch sizes that are counted apart.
SIZE_BOUNDS = (*(float(1 << power) for power in range(11)), float("inf"))

#: Upper bounds of the waits that are counted apart, in seconds.
WAIT_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
    float("inf"),
)


#: The same for the pauses between two tokens of a text.
TOKEN_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
    float("inf"),
)


class Ratio:
    """A part of a whole, as an attribute; None where there is no whole."""

    def __init__(self, part: str, whole: str, digits: int = DIGITS) -> None:
        """Names of two sums of its owner, and how many digits are behind the point."""
        self._part, self._whole, self._digits = part, whole, digits

    def __get__(self, sums: Any, owner: type) -> float | None:
        return divide(getattr(sums, self._part), getattr(sums, self._whole), self._digits)


def divide(part: float, whole: float | None, digits: int = DIGITS) -> float | None:
    """A part of a whole, rounded; None where there is no whole."""
    return round(part / whole, digits) if whole else None


def report(figures: Any) -> Any:
    """Figures for JSON: with their ratios, rounded, and with texts as keys."""
    if isinstance(figures, Mapping):
        return {str(key): report(value) for key, value in figures.items()}
    if not is_dataclass(figures):
        return round(figures, DIGITS) if isinstance(figures, float) else figures
    names, owner = [each.name for each in fields(figures)], cast(type, type(figures))
    for kind in owner.__mro__:
        names += [name for name, value in vars(kind).items() if isinstance(value, Ratio)]
    return {name: report(getattr(figures, name)) for name in names}


@dataclass(slots=True)
class BatchSums:
    """Sums over batches since the worker started."""

    batches: int = 0
    items: int = 0
    forward_ms: float = 0.0
    tokens: int = 0
    #: With padding.
    computed_tokens: int = 0

    #: Items per batch.
    mean_batch_size = Ratio("items", "batches")
    #: Share of the computed tokens that carried nothing.
    padding_waste = Ratio("wasted_tokens", "computed_tokens")

    @property
    def wasted_tokens(self) -> int:
        """Padding."""
        return self.computed_tokens - self.tokens

    def since(self, before: Self) -> Self | None:
        """The sums of the time between two moments; None if the worker was restarted meanwhile."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        gained = {
            name: value - getattr(before, name)
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        return replace(self, **gained) if min(gained.values()) >= 0 else None


@dataclass(slots=True)
class CacheFigures:
    """Counts of one task with a cache, since the worker started."""

    items: int = 0
    #: Items whose result was in Redis.
    hits: int = 0
    #: Items that shared the result of an equal item in the same or the previous batch.
    deduplicated: int = 0
    computed: int = 0
    #: Number of failed reads and writes, and the last error.
    errors: int = 0
    error: str = ""

    #: Share of the items that were not computed.
    hit_rate = Ratio("saved", "items", 4)

    @property
    def saved(self) -> int:
        """Items that were not computed."""
        return self.hits + self.deduplicated


@dataclass(slots=True)
class TextFigures:
    """Sums over the texts of one task, which a model with slots has written."""

    tokens_in: int = 0
    tokens_out: int = 0
    #: Number of texts by how long their first token took, from when the job was sent: by the least
    #: of `WAIT_BOUNDS_S` that is not below it. Then all these times together.
    first_tokens: Counter[float] = field(default_factory=Counter)
    first_tokens_s: float = 0.0
    #: The same of the mean pause between two tokens of a text, by `TOKEN_BOUNDS_S`.
    pauses: Counter[float] = field(default_factory=Counter)
    pauses_s: float = 0.0

    def add(
        self, first_token_s: float, pause_s: float | None, tokens_in: int, tokens_out: int
    ) -> None:
        """Counts a text.

        Args:
            first_token_s: When its first token was there, in seconds from when the job was sent.
            pause_s: Mean time between two tokens; None for a text of one token.
            tokens_in: Tokens of the prompt.
            tokens_out: Tokens of the text.
        """
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        self.first_tokens[find_bound(WAIT_BOUNDS_S, first_token_s)] += 1
        self.first_tokens_s += first_token_s
        if pause_s is not None:
            self.pauses[find_bound(TOKEN_BOUNDS_S, pause_s)] += 1
            self.pauses_s += pause_s


def add(first: Any, second: Any) -> Any:
    """Adds figures of the same kind; what cannot be added is that of the first one."""
    if is_dataclass(first) and not isinstance(first, type):
        own = cast(Any, first)
        names = [each.name for each in fields(own)]
        return replace(
            own, **{name: add(getattr(own, name), getattr(second, name)) for name in names}
        )
    if isinstance(first, Mapping):
        shared = {key: add(value, second[key]) for key, value in first.items() if key in second}
        merged = {**first, **second, **shared}
        return Counter(merged) if isinstance(first, Counter) else merged
    if isinstance(first, int | float) and not isinstance(first, bool) and second is not None:
        return first + second
    return second if first is None else first


def find_bound(bounds: Sequence[float], value: float) -> float:
    """The least of some bounds, of which the last one is infinite, that is not below a value."""
    return bounds[bisect_left(bounds, value)]


@dataclass(slots=True)
class TaskFigures(BatchSums):
    """Sums over the batches of one task."""

    #: Number of jobs that ended, by how: `succeeded`, `failed`, `shed` or `fenced`.
    outcomes: Counter[str] = field(default_factory=Counter)
    #: Number of batches by their number of items: by the least of `SIZE_BOUNDS` that is not below.
    batch_sizes: Counter[float] = field(default_factory=Counter)
    #: Number of jobs by how long they waited from being sent until their batch left: by the least
    #: of `WAIT_BOUNDS_S` that is not below it.
    waits: Counter[float] = field(default_factory=Counter)
    #: All these waits together.
    waited_s: float = 0.0


@dataclass(slots=True)
class BatchFigures(BatchSums):
    """Sums over all batches of a worker; times are those of all batches or jobs together."""

    jobs: int = 0
    failed_jobs: int = 0
    #: Items of multi-item jobs that failed; their jobs did not.
    failed_items: int = 0
    #: Number of failed jobs and of these items, by class of the error.
    failures: Counter[str] = field(default_factory=Counter)
    #: Jobs whose result a device stored itself; Celery's tracer completed the others.
    committed_jobs: int = 0
    #: Jobs whose outcome was dropped, because another worker has taken them over.
    fenced_jobs: int = 0
    #: Jobs that could not make their deadline, and were not begun.
    shed_jobs: int = 0
    device_restarts: int = 0
    #: From when jobs were sent, as far as they say that, until their batch left for the device.
    waited_ms: float = 0.0
    prepare_ms: float = 0.0
    #: Between the stages of a batch on its device.
    queued_ms: float = 0.0
    commit_ms: float = 0.0
    #: Number of jobs that Celery's tracer completed, by reason.
    tracer_jobs: Counter[str] = field(default_factory=Counter)
    #: Counts of the caches, by task.
    caches: dict[str, CacheFigures] = field(default_factory=dict)
    tasks: dict[str, TaskFigures] = field(default_factory=dict)
    #: What texts took, by task.
    texts: dict[str, TextFigures] = field(default_factory=dict)

    #: Of a job; of a batch and each of its stages.
    mean_waited_ms = Ratio("waited_ms", "jobs")
    mean_prepare_ms = Ratio("prepare_ms", "batches")
    mean_queued_ms = Ratio("queued_ms", "batches")
    mean_forward_ms = Ratio("forward_ms", "batches")
    mean_commit_ms = Ratio("commit_ms", "batches")


@dataclass(slots=True)
class MemorySnapshot:
    """A device's memory in bytes; a CPU has none of its own."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(slots=True)
class LearnedCosts:
    """How long a batch of a task has its device, learned from those that ran."""

    item_us: float
    pass_ms: float
    batches: int
    #: Mean share by which they were wrong; None before it is known.
    error: float | None = None


@dataclass(slots=True)
class ModelSnapshot:
    """A model on a device, by what somebody reads; costs are 0 until they are learned."""

    max_batch_tokens: int = 0
    chosen_by: str = ""
    #: How many forward passes failed for want of memory.
    out_of_memory: int = 0
    #: Of a model whose items have slots: how many there are and were taken last; 0 for any other.
    slots: int = 0
    slots_taken: int = 0
    #: How many steps it has made, and how long each took.
    steps: int = 0
    step_ms: float | None = None
    #: Floating-point operations on tokens that carried something; 0 where nobody counts them.
    flops: float = 0.0
    token_us: float = 0.0
    pass_ms: float = 0.0
    #: Its name for what it has loaded; empty if it has none.
    version: str = ""
    #: `loaded`, or `not loaded`. Older workers load all at their start.
    state: str = "loaded"
    #: Why it is on this device.
    why: str = ""
    #: Its memory there; estimated before the first load, and None if nobody knows.
    held_bytes: int | None = None
    #: How often it was loaded or taken back, and how long the last load took.
    loads: int = 0
    load_s: float | None = None


@dataclass(slots=True)
class DeviceSnapshot:
    """A device of a worker."""

    state: str
    batches_in_flight: int
    #: For how long the batch that began first has run; older workers do not report it.
    oldest_batch_s: float | None = None
    #: Why it was given up.
    error: str = ""
    pid: int | None = None
    load_s: float = 0.0
    #: Main memory of its process.
    resident_kib: int | None = None
    memory: MemorySnapshot = field(default_factory=MemorySnapshot)
    models: dict[str, ModelSnapshot] = field(default_factory=dict)
    done: BatchSums = field(default_factory=BatchSums)


@dataclass(slots=True)
class WaitingJobs:
    """Jobs of one queue that wait in a worker, and the age of the oldest."""

    jobs: int
    oldest_s: float


@dataclass(slots=True)
class LeaseFigures:
    """The messages that a worker holds, and its round trips to Redis."""

    held: int = 0
    #: Messages of dead workers that this one has put back into their queues.
    recovered: int = 0
    #: By name of the script.
    scripts: dict[str, ScriptTime] = field(default_factory=dict)

    @property
    def round_trips(self) -> int:
        """How often they were run."""
        return sum(script.calls for script in self.scripts.values())


@dataclass(slots=True)
class HealthFigures:
    """What `/livez` and `/readyz` of a worker say."""

    live: bool
    ready: bool
    #: When the worker was started, in Unix seconds; None from an older one.
    started_at_s: float | None = None


@dataclass(slots=True)
class WorkerFigures:
    """The answer of a worker with devices."""

    devices: dict[str, DeviceSnapshot]
    batches: BatchFigures
    #: On a clock of its own.
    clock_s: float
    waiting: int = 0
    oldest_waiting_s: float | None = None
    waiting_by_queue: dict[str, WaitingJobs] = field(default_factory=dict)
    #: By task.
    costs: dict[str, LearnedCosts] = field(default_factory=dict)
    #: Names of the queues that it consumes.
    queues: list[str] = field(default_factory=list)
    #: None where the broker is no Redis, while it is away, and of older workers.
    leases: LeaseFigures | None = None
    #: None of older workers.
    health: HealthFigures | None = None

    def since(self, before: "WorkerFigures | None") -> "WorkerFigures | None":
        """The figures of the time between two answers, whose length is then `clock_s`.

        Returns:
            Devices that were not there before are left out. None without an answer before, or if
            the worker was restarted since.
        """
        if before is None or self.clock_s <= before.clock_s:
            return None
        batches = self.batches.since(before.batches)
        if batches is None:
            return None
        devices = {
            name: replace(device, done=done)
            for name, device in self.devices.items()
            if (old := before.devices.get(name)) is not None
            and (done := device.done.since(old.done)) is not None
        }
        seconds = self.clock_s - before.clock_s
        return replace(self, clock_s=seconds, batches=batches, devices=devices)


def read_figures(answer: Mapping[str, Any]) -> WorkerFigures | None:
    """Reads the answer of a worker; None if it has no devices, or answers with something else."""
    try:
        return _reader().validate_python(answer)
    except ValidationError:
        return None


@cache
def _reader() -> TypeAdapter[WorkerFigures]:
    return TypeAdapter(WorkerFigures)
