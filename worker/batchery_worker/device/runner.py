"""What runs the batches of a task on its device: the seam behind which functions and models stand.

A task names the class of its runner, as Celery's tasks name that of their requests. A device makes
one of each class that its tasks name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from celery import Celery

from batchery_worker.batch import DeviceBatch
from batchery_worker.device.pieces import PieceWriter
from batchery_worker.ipc.messages import Reply, Setup
from batchery_worker.memory import Memory


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What a runner is given of its device."""

    app: Celery
    setup: Setup
    #: As torch spells it, of several parts the first one.
    device: str
    memory: Memory
    pieces: PieceWriter
    #: Sends a message to the worker.
    tell: Callable[[Reply], None]
    #: Finds the tasks whose jobs wait.
    find_wanted: Callable[[], frozenset[str]]
    #: Gives the jobs of a batch back that has not begun, before the process ends; from any thread.
    give_back: Callable[[DeviceBatch], None]


class Between(NamedTuple):
    """What a runner calls while it runs a batch."""

    #: Runs what is urgent: between two forward passes, or two calls of a function.
    run_urgent: Callable[[], None]
    #: Starts the next batch, where a device computes by itself what was launched.
    start_next: Callable[[], None]
    #: Awaits what a function returns.
    resolve: Callable[[Any], Any]


class Runner(Protocol):
    """Runs batches; for the main thread, but for `choose`, `prepare` and `figures`."""

    def __init__(self, context: RunnerContext) -> None:
        """Loads nothing yet."""

    def start(self) -> None:
        """Loads what must be there before the device is ready.

        Raises:
            BatcheryError: It cannot; says what is missing.
        """

    def choose(self, batch: DeviceBatch) -> str:
        """Chooses what a batch is run with; returns what its results depend on besides items."""

    def prepare(self, batch: DeviceBatch, items: list[Any]) -> Sequence[Any]:
        """Prepares items, one by one; those of `Failed` are not run."""

    def make_ready(self, batch: DeviceBatch) -> bool:
        """Loads what a batch needs; returns whether it must be prepared anew.

        Raises:
            BatcheryError: It cannot; the batch fails.
        """

    def may_interrupt(self, batch: DeviceBatch) -> bool:
        """Whether a batch may run in the midst of another one: it loads nothing."""

    def run(self, batch: DeviceBatch, items: list[Any], between: Between) -> list[Any]:
        """Runs prepared items; returns one outcome for each, in order."""

    def start_ahead(self, batch: DeviceBatch) -> None:
        """Starts the first pass of a batch whose turn comes next."""

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` shows, by task."""
