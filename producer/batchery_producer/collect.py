"""Collecting: how results are awaited, without a subscription for each job.

Jobs in flight are polled: on Redis with `MGET`, many keys at a time; on other backends one by one
through Celery's own `AsyncResult`. How often depends on how fast results come: see `Pace`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from celery import Celery, states
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult
from kombu.exceptions import KombuError

from batchery_producer.patience import Patience

#: Results that are asked for, and held in memory, at a time.
CHUNK = 128

#: Shortest and longest pause between two sweeps, in seconds: what one job alone waits for its
#: result at most, and how often a display has something new to show.
SHORTEST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.25

#: Part of the jobs in flight that should end between two sweeps. Less costs more sweeps per result;
#: more lets the queue run dry before the window is filled again.
SHARE_PER_SWEEP = 1 / 8


@dataclass(frozen=True, slots=True)
class Answer:
    """How a job ended.

    Attributes:
        value: What it returned; None if it failed.
        error: None if it succeeded, otherwise the name of the error's type and its text.
    """

    value: Any = None
    error: tuple[str, str] | None = None


class Collector(Protocol):
    """Asks a result backend."""

    def ready(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        """Yields the jobs among these that have ended; some may be asked for later than others."""

    def forget(self, task_ids: Sequence[str]) -> None:
        """Removes results from the backend."""


def collector_for(app: Celery, patience: Patience) -> Collector:
    """Picks the collector that knows the app's result backend best."""
    if isinstance(app.backend, RedisBackend):
        return RedisCollector(app.backend, patience)
    return AnyCollector(app, patience)


class RedisCollector:
    """Asks Redis for many results in one command."""

    def __init__(self, backend: RedisBackend, patience: Patience) -> None:
        self._backend = backend
        self._patience = patience
        self._errors: tuple[type[BaseException], ...] = backend.connection_errors  # type: ignore[attr-defined]

    def ready(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        """As `Collector.ready`; raises what a `Patience` raises."""
        for chunk in _chunks(task_ids):
            keys = self._keys(chunk)
            values = self._patience.call(partial(self._backend.client.mget, keys), self._errors)
            for task_id, value in zip(chunk, values, strict=True):
                if value is not None and (answer := self._answer(value)):
                    yield task_id, answer

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `Patience` raises."""
        for chunk in _chunks(task_ids):
            self._patience.call(
                partial(self._backend.client.unlink, *self._keys(chunk)),
                self._errors,
            )

    def _keys(self, task_ids: Sequence[str]) -> list[Any]:
        return [self._backend.get_key_for_task(task_id) for task_id in task_ids]

    def _answer(self, payload: bytes) -> Answer | None:
        try:
            meta = self._backend.decode(payload)
        except (KombuError, ValueError) as error:
            return Answer(error=(type(error).__name__, f"a result that cannot be read: {error}"))
        return answer_of(meta.get("status"), meta.get("result"))


class AnyCollector:
    """Asks any backend that Celery has, for one result at a time."""

    def __init__(self, app: Celery, patience: Patience) -> None:
        self._app = app
        self._patience = patience
        # Not every backend says what a lost connection looks like.
        self._errors: tuple[type[BaseException], ...] = (
            *getattr(app.backend, "connection_errors", ()),
            ConnectionError,
        )

    def ready(self, task_ids: Sequence[str]) -> Iterator[tuple[str, Answer]]:
        """As `Collector.ready`; raises what a `Patience` raises."""
        for task_id in task_ids:
            if answer := self._patience.call(partial(self._ask, task_id), self._errors):
                yield task_id, answer

    def forget(self, task_ids: Sequence[str]) -> None:
        """As `Collector.forget`; raises what a `Patience` raises."""
        for task_id in task_ids:
            self._patience.call(partial(self._forget, task_id), self._errors)

    def _ask(self, task_id: str) -> Answer | None:
        result: AsyncResult[Any] = AsyncResult(task_id, app=self._app)
        # Ready jobs are cached with their result: it is one request for both.
        return answer_of(result.state, result.result) if result.ready() else None

    def _forget(self, task_id: str) -> None:
        # RPC forgets nothing: there, a result that was read is gone already.
        with suppress(NotImplementedError):
            AsyncResult(task_id, app=self._app).forget()


def answer_of(status: str | None, result: Any) -> Answer | None:
    """Reads a stored result.

    Args:
        status: Celery's name of the state.
        result: The value; of a failure the exception, or the mapping that is stored for one.

    Returns:
        None while the job has not ended.
    """
    if status == states.SUCCESS:
        return Answer(value=result)
    if status in states.EXCEPTION_STATES and status in states.READY_STATES:
        return Answer(error=describe(result))
    return None


def describe(error: Any) -> tuple[str, str]:
    """Name and text of an error, as the worker stored it.

    The stored form is read as it is, so that no exception class need be importable here.
    """
    if not isinstance(error, Mapping):
        return type(error).__name__, str(error)
    arguments = error.get("exc_message", "")
    if isinstance(arguments, list | tuple):
        arguments = ", ".join(map(str, arguments))
    return str(error.get("exc_type", "Exception")), str(arguments)


class Pace:
    """How long to wait between two sweeps: long enough to find many results, never idle long. Pure.

    The time between sweeps follows the rate at which results come. While none come the pauses grow.
    """

    def __init__(self) -> None:
        self._pause_s = SHORTEST_PAUSE_S
        self._rate: float | None = None

    def pause_s(self, *, in_flight: int, arrived: int, since_s: float, sweep_s: float) -> float:
        """How long to wait after a sweep, in seconds.

        Args:
            in_flight: Jobs that are still awaited.
            arrived: Results that the sweep found.
            since_s: Time since the sweep before, in seconds.
            sweep_s: What this one took: at most half of the time is spent asking.
        """
        if arrived:
            rate = arrived / max(since_s, SHORTEST_PAUSE_S)
            self._rate = rate if self._rate is None else (self._rate + rate) / 2
            self._pause_s = in_flight * SHARE_PER_SWEEP / self._rate
        else:
            self._pause_s *= 1.5
        self._pause_s = min(max(self._pause_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        return max(self._pause_s, sweep_s)


def _chunks(task_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(task_ids), CHUNK):
        yield task_ids[start : start + CHUNK]
