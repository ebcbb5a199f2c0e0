"""`batchery explain TASK_ID`: what became of one job, in one line."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from celery import Celery

from batchery.cli.app import check_backend, check_broker, timeout_option, with_app
from batchery.cli.console import AWAY, broker_errors, describe, printable
from batchery.cli.dead_letters import open_dead_letters
from batchery.cli.survey import PATIENCE_S, ask_workers, find_workers, registered_workers
from batchery.errors import StartError

#: Exit codes of `batchery explain`.
SUCCEEDED, FAILED, UNFINISHED, UNKNOWN = 0, 1, 3, 4

#: State in Celery's result -> exit code. A job in any other state is not finished.
ENDS = {"SUCCESS": SUCCEEDED, "FAILURE": FAILED, "REVOKED": FAILED}

#: State of a job, as a worker calls it -> the same in words.
IN_WORKER = {
    "active": "runs on",
    "reserved": "waits in",
    "scheduled": "waits for its time in",
    "ready": "has ended in",
}


#: What is said of the batch of a job.
FACTS = (
    *("waited_ms", "id", "size", "padding", "prepare_ms", "queued_ms", "forward_ms"),
    *("device", "version"),
)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The status of one job.

    Attributes:
        state: Celery's state; for a job without a result, one of `WAITING`, `ACTIVE`, `SCHEDULED`,
            `ENDED` and `UNKNOWN`.
        text: An explanation, in words.
        exit_code: Exit code of `batchery explain`.
        batch: Facts of the batch, as they are stored with the result.
        error: Why the job failed, or is tried again.
        worker: The worker that has a job without a result.
    """

    task_id: str
    state: str
    text: str
    exit_code: int
    batch: Mapping[str, Any] | None = None
    error: str | None = None
    worker: str | None = None

    @property
    def line(self) -> str:
        """For people."""
        return printable(f"{self.state}: {self.text}")

    def report(self) -> dict[str, Any]:
        """For programs: the same as values for JSON."""
        report = asdict(self)
        del report["exit_code"]
        return report


def from_result(task_id: str, stored: Mapping[str, Any]) -> JobStatus:
    """Explains a job by its stored result, the answer of `backend.get_task_meta`."""
    state = str(stored["status"])
    batch = stored.get("batch")
    result = stored.get("result")
    error = format_error(result) if isinstance(result, BaseException) else None
    known = describe(batch, FACTS) if batch else "no facts of a batch are stored with its result"
    return JobStatus(
        task_id,
        state,
        f"{known}; {error}" if error else known,
        ENDS.get(state, UNFINISHED),
        batch=batch,
        error=error,
    )


def from_workers(task_id: str, answers: Mapping[str, Any]) -> JobStatus:
    """Explains a job without a result by each worker's answer to `celery inspect query_task`."""
    for worker, found in sorted(answers.items()):
        # A worker that does not understand the question answers with another dictionary.
        job: Sequence[Any] | None = found.get(task_id)
        if job is not None:
            where = str(job[0])
            state = {"reserved": "WAITING", "ready": "ENDED"}.get(where, where.upper())
            text = f"{IN_WORKER.get(where, 'is in')} worker {worker}"
            return JobStatus(task_id, state, text, UNFINISHED, worker=worker)
    who = f"none of {len(answers)} workers has it" if answers else "no worker answers"
    if len(answers) == 1:
        who = f"worker {next(iter(answers))} does not have it"
    text = f"no result, and {who}: still in its queue, expired, or never sent"
    return JobStatus(task_id, "UNKNOWN", text, UNKNOWN)


def format_error(error: BaseException) -> str:
    """An exception in one line: its type and its text."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


@click.command()
@click.argument("task_id")
@with_app
@timeout_option(PATIENCE_S, "How long to wait for a worker that lives and does not answer.")
@click.option("--json", "as_json", is_flag=True, help="The same as a JSON object.")
@click.pass_context
def explain(
    context: click.Context, *, task_id: str, app: Celery, timeout_s: float, as_json: bool
) -> None:
    """Say what became of a job, and in which batch it ran.

    A job with a stored result is explained by it. Of any other one the workers are asked: is it
    waiting, active or scheduled there? A job that is still in its queue cannot be told from one
    that has expired or was never sent.

    \b
    Exit codes:
      0  it succeeded
      1  it failed, or was revoked
      2  could not start: no such app, or its Redis does not answer
      3  it is not finished
      4  nothing is known of it
    """  # noqa: D301 (click looks for this character)
    if not task_id:
        raise click.UsageError("TASK_ID is empty")
    found = find(app, task_id, timeout_s)
    click.echo(json.dumps(found.report()) if as_json else found.line)
    context.exit(found.exit_code)


def find(app: Celery, task_id: str, timeout_s: float = PATIENCE_S) -> JobStatus:
    """Looks for a job: first in the result backend, then in the workers.

    Args:
        app: The app whose backend and workers are asked.
        task_id: Id of the job.
        timeout_s: How long workers are awaited that live, in seconds. If there is a result, nobody
            asks them.
    """
    check_backend(app)
    with broker_errors("Redis"):
        stored = app.backend.get_task_meta(task_id)
        if stored["status"] != "PENDING":
            job = from_result(task_id, stored)
            return _with_dead_letter(app, job) if job.exit_code == FAILED else job
        check_broker(app)
        live = find_workers(app, registered_workers(app))
        answers = ask_workers(app, "query_task", timeout_s, live, ids=[task_id])
        job = from_workers(task_id, answers)
        # Its result may be ignored, or gone.
        return _with_dead_letter(app, job) if job.exit_code == UNKNOWN else job


def _with_dead_letter(app: Celery, job: JobStatus) -> JobStatus:
    """Names the dead letter of a job, if there is one, and its broker answers."""
    token = None
    with suppress(StartError, *AWAY), open_dead_letters(app) as letters:
        token = letters.find(job.task_id)
    if token is None:
        return job
    text = f"{job.text}; its message is a dead letter, see `batchery dead show {token}`"
    return replace(job, text=text)
