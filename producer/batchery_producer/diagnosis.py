"""Why does nothing come? Asks the broker and the workers, and says it in one sentence."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery

from batchery.errors import SettingsError

#: Silence after which it is said once what is being waited for, in seconds.
HINT_S = 20.0

#: How long workers may take to answer, in seconds. All that answer in this time are heard.
ASK_S = 1.0

#: Tasks that a message names at most.
MOST_NAMED = 8


class Silence:
    """Watches that results come, and says why none may."""

    def __init__(
        self, explain: Callable[[], str], notice: Callable[[str], None], timeout_s: float | None
    ) -> None:
        """Begins to listen.

        Args:
            explain: Says why nothing may be coming.
            notice: Gets a line for the user, once in each silence that lasts `HINT_S`.
            timeout_s: Longest silence, in seconds; None for no limit.
        """
        self._explain = explain
        self._notice = notice
        self._timeout_s = timeout_s
        self.heard()

    def heard(self) -> None:
        """A result has come, or nothing was awaited until now."""
        self._heard_s, self._hinted = time.monotonic(), False

    def check(self) -> str:
        """Returns what to say of a silence that has lasted too long; else nothing."""
        silent_s = time.monotonic() - self._heard_s
        if self._timeout_s is not None and silent_s > self._timeout_s:
            return f"no result for {self._timeout_s:g} s: {self._explain()}"
        if silent_s > HINT_S and not self._hinted:
            self._hinted = True
            self._notice(f"no result for {silent_s:.0f} s: {self._explain()}")
        return ""


def check_workers(app: Celery, task: str, queue: str) -> None:
    """Makes sure that somebody knows a task, as far as workers answer.

    Takes a moment if one that knows it is quick to say so, otherwise a few seconds.

    Raises:
        SettingsError: Workers consume the queue, and none of them has the task.
    """
    try:
        first = app.control.inspect(limit=1, timeout=ASK_S).registered() or {}
        if not first or any(task in tasks for tasks in first.values()):
            return
        queues = app.control.inspect(timeout=ASK_S).active_queues() or {}
        takers = _takers(queues, queue)
        known = app.control.inspect(takers, timeout=ASK_S).registered() if takers else None
    except Exception:  # noqa: BLE001 (every transport has its own; some cannot ask at all)
        return
    if known and not any(task in tasks for tasks in known.values()):
        has = sorted({name for tasks in known.values() for name in tasks})
        more = f" and {len(has) - MOST_NAMED} more" if len(has) > MOST_NAMED else ""
        raise SettingsError(
            f"task {task!r}: {_list(takers)} consumes queue {queue!r} and has no such task;"
            f" it has {', '.join(has[:MOST_NAMED]) or 'none'}{more}"
        )


def explain_silence(app: Celery, task: str, queue: str) -> str:
    """Says how many jobs wait in a queue, and which workers would take them.

    Takes a few seconds at most. Never fails: what cannot be asked is said, too.
    """
    try:
        workers = app.control.inspect(timeout=ASK_S).active_queues() or {}
        waiting = _waiting(app, queue)
    except Exception as error:  # noqa: BLE001 (every transport has its own)
        return f"the broker cannot be asked about queue {queue!r}: {error}"
    return f"{waiting:,} waiting in queue {queue!r}; {_workers(app, workers, task, queue)}"


def _waiting(app: Celery, queue: str) -> int:
    with app.connection_for_read() as connection:
        channel: Any = connection.default_channel
        try:
            return int(channel.queue_declare(queue=queue, passive=True).message_count)
        except connection.channel_errors:
            return 0  # Redis: an empty queue does not exist.


def _workers(
    app: Celery, workers: Mapping[str, Sequence[Mapping[str, Any]]], task: str, queue: str
) -> str:
    if not workers:
        return (
            "no worker answers (none runs, all are too busy, or they use another broker):"
            f" start one with `celery -A YOUR_APP worker -Q {queue}`"
        )
    takers = _takers(workers, queue)
    if not takers:
        return (
            f"{_list(sorted(workers))} answers, but consumes another queue:"
            f" start a worker with `-Q {queue}`, or name its queue with --queue"
        )
    known = app.control.inspect(takers, timeout=ASK_S).registered() or {}
    if known and not any(task in tasks for tasks in known.values()):
        return f"{_list(takers)} consumes it, but has no task {task!r}"
    return f"{_list(takers)} consumes it and answers, so it is busy, or the jobs left no result"


def _takers(workers: Mapping[str, Sequence[Mapping[str, Any]]], queue: str) -> list[str]:
    """Names of the workers that consume a queue."""
    return sorted(
        name for name, queues in workers.items() if any(each["name"] == queue for each in queues)
    )


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
