"""The loop of a device whose model runs in slots: jobs join, advance and leave between steps.

Jobs are prepared on a thread beside the steps, and answered on another one. So all that a step
waits for is the model. The limits of a job count from its arrival here, and act between two steps.
"""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from celery.exceptions import SoftTimeLimitExceeded, TimeLimitExceeded

from batchery.errors import DeadlineExceeded
from batchery.execution.batch import prepare
from batchery.execution.bisect_failures import NON_VALUES
from batchery.execution.steps import SlotItem, Slots
from batchery.model import GOES_ON, StepModel
from batchery.model_task import ModelTask
from batchery.outcomes import Failed
from batchery_worker.batch import DeviceBatch, TextTimes
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.device.runner import RunnerContext
from batchery_worker.ipc.messages import Stepped
from batchery_worker.serving.loading import load_model
from batchery_worker.work import Cancel, Work

#: How often the worker is told that there are steps, in seconds.
SIGN_PAUSE_S = 1.0

#: What `batchery.GenerationTimings` says, in milliseconds.
_TIMINGS = ("first_token_ms", "total_ms")

#: Id of a batch, and position of an item in it.
ItemId = tuple[int, int]

#: What is known of a job whose time is over: its failure, or that nobody wants it any more.
Verdict = Failed | CommitStatus


@dataclass(slots=True, eq=False)
class SlotJob:
    """A job whose items have slots, or wait for them."""

    batch: DeviceBatch
    #: `GOES_ON` for an item that has none yet.
    outcomes: list[Any]
    #: Number of items without an outcome.
    left: int
    #: Pieces that were sent before it came here.
    pieces: Sequence[Any]
    #: When its time is over, on the clock of `time.monotonic`, and what it ends with.
    due_s: float
    verdict: Verdict
    #: When it came, on the clock of `time.perf_counter`.
    came_s: float


class SlotLoop:
    """Runs jobs in the slots of a model; for one thread, but for `prepare`."""

    def __init__(
        self,
        context: RunnerContext,
        finish: Callable[[DeviceBatch, bool], None],
        free_slot: Callable[[int], None],
    ) -> None:
        """Loads the model; has no jobs.

        Args:
            context: Of the device.
            finish: Answers a job that has left its slots; is told whether no other one goes on.
            free_slot: Called with the id of a batch of which an item has left, and others go on.

        Raises:
            ModelLoadError: The model cannot be loaded.
        """
        self._setup = setup = context.setup
        task = cast(ModelTask, context.app.tasks[setup.task])
        loaded = load_model(task, setup.device)
        self._model = model = cast(StepModel, loaded)
        self._version = model.version()
        #: Whether a job may make room for another one; see `StepModel.resumes`.
        self.resumes = bool(model.resumes)
        self._slots: Slots[ItemId] = Slots(model, setup.slots)
        self._finish = finish
        self._free_slot = free_slot
        self._tell = context.tell
        self._pieces = context.pieces
        self._jobs: dict[int, SlotJob] = {}
        self._steps = 0
        self._steps_s = 0.0
        self._told_s = -inf

    def prepare(self, batch: DeviceBatch, pieces: Sequence[Any] = ()) -> SlotJob:
        """Prepares a batch of one job, of which these pieces were sent before."""
        started_s, work = time.perf_counter(), batch.work
        (_, items, _) = work.jobs[0]
        batch.items = prepare(self._model, items, work.keywords)
        batch.ended_s = time.perf_counter()
        batch.prepare_ms = (batch.ended_s - started_s) * 1e3
        batch.version = self._version
        outcomes = [each if isinstance(each, NON_VALUES) else GOES_ON for each in batch.items]
        left = outcomes.count(GOES_ON)
        return SlotJob(batch, outcomes, left, pieces, *_find_end(work), started_s)

    def run(self, intake: Any) -> None:
        """Works until the process ends.

        Args:
            intake: Brings jobs: a `Feed`, or what has its `take`, `take_arrived` and `read_ahead`.

        Raises:
            Exception: The model has, in `step` or `leave`: nothing is known of its items any more.
        """
        while True:
            if self._jobs:
                intake.read_ahead()
            else:
                self._take_in(intake.take())
            with suppress(queue.Empty):
                while True:
                    self._take_in(intake.take_arrived())
            self._end_late()
            if self._jobs:
                self._step()

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` shows of the model, by its task."""
        figures = {
            "state": "loaded",
            "why": self._setup.models.get(self._setup.task, ""),
            **({"version": self._version} if self._version else {}),
            "slots": self._setup.slots,
            "slots_taken": self._slots.taken,
            "steps": self._steps,
            "step_ms": round(self._steps_s * 1e3 / self._steps, 3) if self._steps else None,
        }
        return {self._setup.task: figures}

    def _take_in(self, message: SlotJob | Cancel) -> None:
        if isinstance(message, Cancel):
            # The job was revoked: what becomes of it is dropped.
            self._drop({message.id: CommitStatus.FENCED})
            return
        batch, work = message.batch, message.batch.work
        now_s = time.perf_counter()
        batch.queued_ms, batch.ended_s = (now_s - batch.ended_s) * 1e3, now_s
        self._jobs[work.id] = message
        items = [
            SlotItem((work.id, at), prepared, work.keywords, message.pieces, work.streams)
            for at, prepared in enumerate(batch.items)
            if not isinstance(prepared, NON_VALUES)
        ]
        if work.instead_of:
            self._make_room(work.instead_of)
            self._slots.add_first(*items)
        else:
            self._slots.add(*items)
        if not message.left:
            self._end(message)

    def _make_room(self, victims: Sequence[int]) -> None:
        """Has the first of some jobs that has a slot go on later."""
        for each in victims if self.resumes else ():
            job = self._jobs.get(each)
            if job and self._slots.put_aside({(each, at) for at in range(len(job.outcomes))}):
                return

    def _step(self) -> None:
        started_s = time.perf_counter()
        told = self._slots.step()
        ended_s = time.perf_counter()
        self._steps += 1
        self._steps_s += ended_s - started_s
        # A step of which nothing comes may be that of an engine that hangs.
        if told and ended_s - self._told_s >= SIGN_PAUSE_S:
            self._told_s = ended_s
            self._tell(Stepped())
        pieces: dict[int, list[Any]] = {}
        for (work_id, _), piece, _ in told:
            if piece is not None and self._jobs[work_id].batch.work.streams:
                pieces.setdefault(work_id, []).append(piece)
        self._drop(self._pieces.write(pieces))
        for (work_id, at), _, outcome in told:
            job = self._jobs.get(work_id)
            if job is None or outcome is GOES_ON:
                continue
            job.outcomes[at] = outcome
            job.left -= 1
            if job.left:
                self._free_slot(work_id)
            else:
                self._end(job)

    def _end_late(self) -> None:
        """Ends the jobs whose time is over."""
        now_s = time.monotonic()
        late = {each: job.verdict for each, job in self._jobs.items() if job.due_s <= now_s}
        if late:
            self._drop(late)

    def _drop(self, verdicts: Mapping[int, Verdict]) -> None:
        """Ends jobs before their time, if they are here."""
        jobs = [(self._jobs[each], why) for each, why in verdicts.items() if each in self._jobs]
        for job, verdict in jobs:
            work = job.batch.work
            self._slots.drop({(work.id, at) for at in range(len(job.outcomes))})
            if isinstance(verdict, CommitStatus):
                job.batch.dropped = verdict
            else:
                outcomes = job.outcomes
                job.outcomes = [verdict if each is GOES_ON else each for each in outcomes]
            self._end(job)

    def _end(self, job: SlotJob) -> None:
        """Has a job answered that has no item here any more."""
        batch = job.batch
        del self._jobs[batch.work.id]
        batch.outcomes = job.outcomes
        # What it waited for a slot, or had made room for others, is no time of the model.
        held_s = (self._slots.take_held_s((batch.work.id, at)) for at in range(len(job.outcomes)))
        batch.forward_ms, batch.ended_s = sum(held_s) * 1e3, time.perf_counter()
        # One that goes on where another process was had its first token there.
        if not job.pieces:
            batch.texts = list(_time_texts(job.outcomes, batch.ended_s - job.came_s))
        self._finish(batch, not self._jobs)


def _time_texts(outcomes: Sequence[Any], took_s: float) -> Iterator[TextTimes]:
    """What `batchery.Generation` says of the texts among some outcomes.

    Args:
        outcomes: Those of one job. A model of the user's own may return anything.
        took_s: From the arrival of the job to its end, in seconds.
    """
    for outcome in outcomes:
        with suppress(Exception):
            # They may be of numpy, and figures leave as JSON.
            first_s, total_s = (float(outcome["timings"][name] / 1e3) for name in _TIMINGS)
            tokens_in, tokens_out = (
                int(outcome[name] or 0) for name in ("tokens_in", "tokens_out")
            )
            has_pauses = tokens_out > 1 and "choices" not in outcome
            pause_s = (total_s - first_s) / (tokens_out - 1) if has_pauses else None
            yield TextTimes(took_s - total_s + first_s, pause_s, tokens_in, tokens_out)


def _find_end(work: Work) -> tuple[float, Verdict]:
    """When the time of a job is over that has come now, and what it ends with then."""
    soft_s, limits = work.soft_time_limit_s, work.slot_limits
    (job_id, _, _) = work.jobs[0]
    late = f"{work.task}[{job_id}] did not end before its deadline"
    ends: list[tuple[float | None, Verdict]] = [
        (soft_s, Failed(SoftTimeLimitExceeded(soft_s))),
        (limits.hard_s, Failed(TimeLimitExceeded(limits.hard_s))),
        (limits.deadline_s, Failed(DeadlineExceeded(late))),
        (limits.expires_s, CommitStatus.REVOKED),
    ]
    left_s, verdict = min(
        ((inf if after_s is None else after_s, verdict) for after_s, verdict in ends),
        key=lambda end: end[0],
    )
    return time.monotonic() + left_s, verdict
