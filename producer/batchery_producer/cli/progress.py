"""Progress of a run: a live line on a terminal; elsewhere, a line every few seconds."""

import time
from contextlib import AbstractContextManager
from itertools import islice
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from batchery_producer.run.summary import Snapshot, duration

#: Time between two lines without a terminal, in seconds.
LINE_EVERY_S = 5.0

#: Maximum number of kinds of failures that are named.
MAX_KINDS = 3


def display_on(console: Console, title: str) -> "LiveDisplay | LineDisplay":
    """Picks the display for a console."""
    return LiveDisplay(console, title) if console.is_terminal else LineDisplay(console)


class LiveDisplay(AbstractContextManager["LiveDisplay"]):
    """A bar and figures, which are updated in place."""

    def __init__(self, console: Console, title: str) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task(title, total=None, figures="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, run: Snapshot) -> None:
        """Shows the state of the run."""
        self._progress.update(self._task, completed=run.done, total=run.total, figures=figures(run))

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


class LineDisplay(AbstractContextManager["LineDisplay"]):
    """A line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next_s = time.monotonic() + LINE_EVERY_S

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to clean up."""

    def show(self, run: Snapshot) -> None:
        """Prints the state of the run, if a line is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_EVERY_S
            self.note(figures(run))

    def note(self, text: str) -> None:
        """Prints a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def figures(run: Snapshot) -> str:
    """The state of a run in one line: `1,200 done, 3 failed, 64 in flight, 410/s, 0:42 left`.

    It also has the kinds of failures and the size of batches, if they are known.
    """
    parts = [
        f"{run.succeeded:,} done",
        f"{run.failed:,} failed{_kinds(run)}",
        f"{run.in_flight:,} in flight",
        *([f"in batches of {run.batch_size:.0f}"] if run.batch_size else []),
        f"{run.rate:,.0f}/s" if run.rate >= 10 else f"{run.rate:.1f}/s",
    ]
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    return ", ".join(parts)


def _kinds(run: Snapshot) -> str:
    named = [f"{count:,} {name}" for name, count in islice(run.kinds.items(), MAX_KINDS)]
    named += ["..."] if len(run.kinds) > MAX_KINDS else []
    return f" ({', '.join(named)})" if named else ""
