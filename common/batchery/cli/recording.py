"""The jobs of live workers, as they tell of them, and the trace that is made of these. Pure."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchery.protocol.recorded_job import RecordedJob

#: Maximum number of messages that are remembered, because they may be delivered again: 25 MB. One
#: that comes again after so many others is recorded twice.
MAX_MESSAGES = 100_000


@dataclass(slots=True)
class RecordedWorker:
    """One of the workers."""

    #: From its last answer.
    recorder: str = ""
    after: int = 0
    devices: int = 0
    costs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Whether it answered when it was asked last.
    answers: bool = True


class Recording:
    """All that the workers have told."""

    def __init__(self) -> None:
        """Has heard of no job."""
        self.workers: dict[str, RecordedWorker] = {}
        #: Names of the queues from which the workers take jobs.
        self.queues: set[str] = set()
        #: Number of jobs by task, and of those that are known to be missing.
        self.tasks: Counter[str] = Counter()
        self.missed = 0
        #: Time of the first job and of the last one, in Unix seconds.
        self.first_s = math.inf
        self.last_s = -math.inf
        #: What else is missing, in words.
        self.gaps: list[str] = []
        #: Workers that cannot be recorded, and why.
        self.refusals: dict[str, str] = {}
        self._max_batch_sizes: dict[str, int] = {}
        self._messages: dict[str, None] = {}

    @property
    def jobs(self) -> int:
        """Number of jobs recorded."""
        return self.tasks.total()

    @property
    def cursors(self) -> dict[str, tuple[str, int]]:
        """What each worker must be told of its last answer, by its name."""
        return {name: (each.recorder, each.after) for name, each in self.workers.items()}

    def add(self, answers: Mapping[str, Mapping[str, Any]], elapsed_s: float) -> list[Any]:
        """Takes the answers to one question.

        Args:
            answers: By worker.
            elapsed_s: Time since the first question, in seconds; 0 for that one.

        Returns:
            The jobs that are new, as lines of a trace.
        """
        for name, worker in self.workers.items():
            worker.answers = name in answers
        lines: list[Any] = []
        for name, answer in answers.items():
            if "rows" not in answer:
                self.refusals[name] = str(answer.get("error", "answers with something else"))
                continue
            self._receive(name, answer, elapsed_s)
            lines += self._lines(answer["rows"])
        return lines

    def left(self, answers: Mapping[str, Mapping[str, Any]]) -> int:
        """How many jobs the workers have kept back for the next question."""
        return sum(answer.get("left", 0) for answer in answers.values())

    def _receive(self, name: str, answer: Mapping[str, Any], elapsed_s: float) -> None:
        worker = self.workers.get(name)
        self.missed += answer["missed"]
        if worker is None:
            worker = self.workers[name] = RecordedWorker()
            if answer["age_s"] < elapsed_s:
                # It was started meanwhile, and all its jobs until now are missing.
                self.missed += answer["after"]
            elif elapsed_s and answer["after"]:
                self.gaps.append(
                    f"{name} answered only after {elapsed_s:.0f} s; its jobs until then are missing"
                )
        elif worker.recorder != answer["recorder"]:
            self.gaps.append(f"{name} was restarted; its last jobs before that may be missing")
        worker.recorder, worker.after = answer["recorder"], answer["after"]
        worker.devices, worker.costs = answer["devices"], answer["costs"]
        self.queues.update(answer["queues"])
        self._max_batch_sizes |= answer["max_batch_sizes"]

    def _lines(self, rows: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
        for job in map(RecordedJob._make, rows):
            if job.message in self._messages:
                continue
            self._messages[job.message] = None
            if len(self._messages) > MAX_MESSAGES:
                del self._messages[next(iter(self._messages))]
            self.tasks[job.task] += 1
            self.first_s = min(job.time_s, self.first_s)
            self.last_s = max(job.time_s, self.last_s)
            yield _line(job)

    # In the end

    def close(self) -> None:
        """Notes which workers do not answer any more."""
        self.gaps += [
            f"{name} no longer answers; its last jobs may be missing"
            for name, worker in sorted(self.workers.items())
            if not worker.answers
        ]

    @property
    def devices(self) -> int:
        """Number of devices of the workers that answer, or of all if none does; at least one."""
        workers = [each for each in self.workers.values() if each.answers]
        return max(1, sum(each.devices for each in workers or self.workers.values()))

    @property
    def costs(self) -> dict[str, tuple[float, float]]:
        """What a batch of each recorded task takes, and each of its items, in milliseconds.

        The workers' costs count by the batches from which they were learned. Tasks whose costs no
        worker has learned are missing.
        """
        found = {}
        for task in sorted(self.tasks):
            known = [each.costs[task] for each in self.workers.values() if task in each.costs]
            weight = sum(each["batches"] for each in known)
            if weight:
                pass_ms, item_us = (
                    sum(each[name] * each["batches"] for each in known) / weight
                    for name in ("pass_ms", "item_us")
                )
                found[task] = pass_ms, item_us / 1e3
        return found

    @property
    def max_batch_sizes(self) -> dict[str, int]:
        """Maximum batch size of each recorded task."""
        return {task: self._max_batch_sizes[task] for task in sorted(self.tasks)}

    def simulate_command(self, path: str) -> str:
        """The command that plays the trace on the same devices."""
        words = ["batchery", "simulate", "--trace", path, "--devices", str(self.devices)]
        if self.tasks:
            words += ["--max-batch-size", str(max(self.max_batch_sizes.values()))]
        for task, (pass_ms, item_ms) in self.costs.items():
            words += ["--cost", task, _number(pass_ms), _number(item_ms)]
        return shlex.join(words)


def _number(ms: float) -> str:
    """A time without an exponent, in microseconds at least."""
    return f"{ms:.6f}".rstrip("0").rstrip(".")


def _line(job: RecordedJob) -> dict[str, Any]:
    """A job as a line of a trace, without what it does not have."""
    line = {
        "time_s": job.time_s,
        "task": job.task,
        "class": job.priority_class,
        "items": job.items,
        "tenant": job.tenant or None,
        "deadline_s": job.deadline_s,
    }
    return {name: value for name, value in line.items() if value is not None}
