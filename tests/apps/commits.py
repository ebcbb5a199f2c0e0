"""An app whose devices can be held up before they compute, and after they have committed."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, RetryAfter, install
from batchery_worker.commit.committer import CommitStatus, JobResult, RedisCommitter
from batchery_worker.work import CommitContext

app = install(Celery("commits", set_as_current=False))
app.conf.update(worker_hijack_root_logger=False, result_extended=True, result_expires=1000)

send = RedisCommitter.send


def commit_and_hold(
    self: RedisCommitter,
    jobs: Sequence[JobResult],
    context: CommitContext,
    info: Mapping[str, Any],
) -> Callable[[], Sequence[CommitStatus]]:
    """Commits; where a result is `{"hold": path}`, says so in that file and answers no more."""
    statuses = send(self, jobs, context, info)()
    for job in jobs:
        result = None if job.json is None else json.loads(job.json)
        if isinstance(result, dict) and "hold" in result:
            Path(result["hold"]).write_text(" ".join(statuses))
            time.sleep(1000)
    return lambda: statuses


RedisCommitter.send = commit_and_hold  # type: ignore[method-assign]


def note(path: str) -> None:
    with open(path, "a") as file:
        file.write("x")


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[Any]:
    return [
        Failed(LookupError(text)) if text == "bad" else f"{text.upper()} of {len(texts)}"
        for text in texts
    ]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def hold(paths: list[str]) -> list[dict[str, str]]:
    """Runs, leaves a trace, is committed, and holds its device up then."""
    for path in paths:
        note(f"{path}.runs")
    return [{"hold": path} for path in paths]


@app.task(shared=False, base=BatchTask, max_batch_size=64, max_retries=3)
def second_time(paths: list[str], *, after_s: float = 0.01) -> list[Any]:
    """Succeeds at the second attempt, so long after the first."""
    outcomes: list[Any] = []
    for path in paths:
        later = RetryAfter(after_s, ConnectionError("away"))
        outcomes.append("done" if Path(path).exists() else later)
        note(path)
    return outcomes


@app.task(shared=False)
def remember(value: Any, path: str) -> None:
    """A callback that leaves a trace."""
    Path(path).write_text(str(value))


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def wait_at(paths: list[str]) -> list[str]:
    """Says that it runs in the file of each path; goes on when there is a `.go` beside it."""
    for path in paths:
        note(path)
    for path in paths:
        while not Path(f"{path}.go").exists():
            time.sleep(0.01)
    return paths
