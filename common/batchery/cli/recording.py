"""`batchery stats --record`: writes the jobs of live workers to a file, as a trace."""

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click
from celery import Celery
from rich.live import Live
from rich.text import Text

from batchery.cli.app import check_broker
from batchery.cli.console import AWAY, Interrupt, write_errors
from batchery.cli.survey import WorkerDirectory, queue_depths
from batchery.errors import counted
from batchery.protocol.figures import RECORD, RecordedJob

#: How often it looks whether it should end, in seconds.
TICK_S = 0.1

#: Maximum number of looks after Ctrl-C: they empty what a worker keeps, if nothing is added.
MAX_LAST_LOOKS = 10

#: Exit code if no worker answered at all.
NO_WORKER = 1

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


def record(app: Celery, path: Path, *, overwrite: bool, as_json: bool, timeout_s: float) -> int:
    """Records the jobs of all workers until Ctrl-C, then says what to try with them.

    Args:
        app: The app whose workers are asked.
        path: The file, which gets a line for each job.
        overwrite: Replace a file that is there.
        as_json: Print what was recorded as one JSON object.
        timeout_s: Time from one look to the next, in seconds.

    Returns:
        The exit code.
    """
    check_broker(app)
    with write_errors(path):
        file = path.open("w" if overwrite else "x", encoding="utf-8")
    # What a full disk did not take is written once more when the file is closed.
    with write_errors(path, "; it has the jobs until now"), file, Interrupt() as ends:
        recorder = _Recorder(app, file, path, timeout_s)
        if as_json:
            recorder.follow(ends, lambda _: None)
        else:
            with Live(auto_refresh=False, transient=True) as live:
                recorder.follow(ends, lambda text: live.update(Text(text), refresh=True))
    recording, waiting = recorder.recording, recorder.waiting()
    if as_json:
        click.echo(json.dumps(_report(recording, path, waiting)))
    else:
        click.echo("\n".join(_summary(recording, path, waiting)))
    return 0 if recording.workers else NO_WORKER


class _Recorder:
    """Asks the workers, and writes down what they say."""

    def __init__(self, app: Celery, file: TextIO, path: Path, timeout_s: float) -> None:
        self._app = app
        self._file = file
        self._path = path
        self._timeout_s = timeout_s
        self._directory = WorkerDirectory(app)
        #: When workers were asked first.
        self._began_s: float | None = None
        self._broker_error = ""
        #: What was said already.
        self._printed: set[str] = set()
        self.recording = Recording()

    def follow(self, ends: Callable[[], bool], show: Callable[[str], None]) -> None:
        """Records until it should end; shows how far it is."""
        while not ends():
            next_s = time.monotonic() + self._timeout_s
            while self._look() and not ends():
                pass
            self._report()
            show(self._progress())
            while not ends() and (left_s := next_s - time.monotonic()) > 0:
                time.sleep(min(TICK_S, left_s))
        for _ in range(MAX_LAST_LOOKS):
            if not (left := self._look()):
                break
        self.recording.missed += left
        self.recording.close()

    def waiting(self) -> int | None:
        """How many jobs no worker has taken yet; None if the broker does not answer."""
        try:
            return sum(queue_depths(self._app, self.recording.queues).values())
        except AWAY:
            return None

    def _look(self) -> int:
        """Asks once; returns how many jobs the workers keep for the next time."""
        recording, now_s = self.recording, time.monotonic()
        try:
            answers = self._directory.ask(self._timeout_s, RECORD, cursors=recording.cursors)
            self._broker_error = ""
        except AWAY as error:
            answers, self._broker_error = {}, str(error)
        else:
            self._began_s = self._began_s or now_s
        lines = recording.add(answers, now_s - (self._began_s or now_s))
        self._file.writelines(f"{json.dumps(line)}\n" for line in lines)
        self._file.flush()
        return recording.left(answers)

    def _report(self) -> None:
        """Says once who is recorded, and who is not."""
        recording = self.recording
        if recording.workers:
            names = ", ".join(sorted(recording.workers))
            self._say(f"recording the jobs of {names} in {self._path}; Ctrl-C ends it")
        elif not self._broker_error:
            self._say("no worker with devices answers yet; recording begins when one does")
        for name, why in sorted(recording.refusals.items()):
            self._say(f"{name} is not recorded: {why}")

    def _say(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            click.echo(text, err=True)

    def _progress(self) -> str:
        if self._broker_error:
            return f"the broker does not answer: {self._broker_error}"
        recording = self.recording
        answering = sum(worker.answers for worker in recording.workers.values())
        missed = f", {recording.missed:,} missed" if recording.missed else ""
        return f"{counted(recording.jobs, 'job')}{missed}, workers that answer: {answering}"


def _report(recording: Recording, path: Path, waiting: int | None) -> dict[str, Any]:
    """What was recorded, for JSON."""
    return {
        "trace": str(path),
        "jobs": recording.jobs,
        "tasks": dict(recording.tasks),
        "missed": recording.missed,
        "gaps": recording.gaps,
        "not_recorded": recording.refusals,
        "waiting": waiting,
        "devices": recording.devices,
        "costs": {
            task: {"pass_ms": pass_ms, "item_ms": item_ms}
            for task, (pass_ms, item_ms) in recording.costs.items()
        },
        "max_batch_sizes": recording.max_batch_sizes,
        "command": recording.simulate_command(str(path)) if recording.jobs else None,
    }


def _summary(recording: Recording, path: Path, waiting: int | None) -> Iterator[str]:
    """The same, as lines for people."""
    if not recording.workers:
        yield "no worker with devices answered; start one: celery -A APP worker"
    span_s = recording.last_s - recording.first_s
    sent = f", sent within {span_s:,.1f} s" if recording.jobs else ""
    yield f"{counted(recording.jobs, 'job')} recorded in {path}{sent}"
    yield (
        f"{counted(recording.missed, 'job')} missed: they came while nobody recorded, or too many"
        " at once"
        if recording.missed
        else "no job missed"
    )
    yield from recording.gaps
    if waiting is None:
        yield "the broker does not answer, so nobody knows how many jobs still wait in the queues"
    elif waiting:
        jobs = counted(waiting, "job")
        yield f"no worker has taken {jobs} that the queues hold; the trace lacks them"
    if recording.jobs:
        yield from _advice(recording)
        yield f"try it: {recording.simulate_command(str(path))}"


def _advice(recording: Recording) -> Iterator[str]:
    """What the command does not have."""
    if unknown := sorted(set(recording.tasks) - set(recording.costs)):
        yield (
            f"no worker has learned yet what a batch costs of {', '.join(unknown)};"
            " say it with --cost, or --pass-ms and --item-ms"
        )
    sizes = recording.max_batch_sizes
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{task} {size}" for task, size in sizes.items())
        yield f"max_batch_size differs ({each}), and the simulator has one: the largest"
