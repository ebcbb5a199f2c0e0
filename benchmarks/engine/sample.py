"""What is asked of every system of the engine benchmark, and what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    """One system, all texts, once."""

    seconds: float
    #: Processor time of each of its processes, by what the process is for.
    cpu_s: Mapping[str, float]
    #: Tokens of the texts, and with padding; 0 where a system does not say.
    tokens: int = 0
    computed_tokens: int = 0
    #: Where the time went, as far as a system says.
    stages_s: Mapping[str, float] = field(default_factory=dict)
    #: One per text, in order; only where they were asked for.
    results: Sequence[Mapping[str, Any]] = ()


class System(Protocol):
    """One row; started, and idle between its runs."""

    name: str

    def wait_ready(self) -> None:
        """Waits until its model is loaded."""

    def run(self, texts: Sequence[str], *, keep: bool = False) -> Sample:
        """Embeds all texts, in any order; keeps the results if asked to."""

    def stop(self) -> None:
        """Ends its processes."""


def cpu_by_name(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Processor time of each process so far, in seconds."""
    return {name: sum(each.cpu_times()[:2]) for name, each in processes.items()}


def cpu_since(
    before: Mapping[str, float], processes: Mapping[str, psutil.Process]
) -> dict[str, float]:
    """What each process has used since `cpu_by_name` was asked before, in seconds."""
    return {name: used - before[name] for name, used in cpu_by_name(processes).items()}
