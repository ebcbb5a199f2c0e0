"""`BatchTask.submit_many`: sends many jobs of a registered task."""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

from celery import result as celery_result
from celery import states
from celery.backends.redis import RedisBackend
from celery.result import AsyncResult, ResultSet
from kombu.exceptions import OperationalError

from batchery.errors import BatcheryError, GaveUp
from batchery.retry import RetryPolicy
from batchery_producer.answers import Answer
from batchery_producer.collector import RedisCollector
from batchery_producer.publisher import Publisher
from batchery_producer.stream import WAIT_S
from batchery_producer.template import uuids

#: How long the broker or the backend may be away, in seconds; short, because a caller waits.
SEND_AWAY_S = 10.0

#: What is left at least of a timeout, in seconds.
LEFT_S = 0.001

# Celery has no types for it.
_assert_will_not_block: Any = vars(celery_result)["assert_will_not_block"]


class JobSet(ResultSet):
    """Celery's set of results, but joining it fetches many results at a time."""

    def __init__(
        self,
        results: Sequence[AsyncResult[Any]],
        collector: "_MetaCollector | None",
        **options: Any,
    ) -> None:
        super().__init__(list(results), **options)
        self._collector = collector

    def join(self, timeout: float | None = None, **options: Any) -> Any:  # type: ignore[override]
        """As Celery's."""
        return super().join(self._fetch(timeout, **options), **options)

    def join_native(  # type: ignore[override]
        self, timeout: float | None = None, **options: Any
    ) -> Any:
        """As Celery's."""
        left_s = self._fetch(timeout, **options)
        if options.get("on_message") is None and self._collector is None:
            # Celery's would wait for a message first, for half a second, though all has come.
            return super().join(left_s, **options)
        return super().join_native(left_s, **options)

    def _fetch(
        self, timeout_s: float | None, disable_sync_subtasks: bool = True, **_: Any
    ) -> float | None:
        """Fills in the results of jobs that have ended. Celery awaits, or gives up, all others.

        Returns:
            What is left of the timeout.
        """
        if disable_sync_subtasks:
            _assert_will_not_block()
        if (collector := self._collector) is None:
            return timeout_s
        deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        results: Any = self.results
        awaited = {result.id: result for result in results if result._cache is None}
        away_s = SEND_AWAY_S if timeout_s is None else min(timeout_s, SEND_AWAY_S)
        collector.retries = RetryPolicy(away_s=away_s)
        with suppress(BatcheryError), closing(collector):
            collector.expect(awaited)
            while awaited and (left_s := deadline_s - time.monotonic()) > 0:
                for task_id, answer in collector.collect(min(left_s, WAIT_S)):
                    if (result := awaited.pop(task_id, None)) is not None:
                        result._maybe_set_cache(answer.value)
        if not awaited:
            self._collector = None
        # To some versions of Celery, 0 means for ever.
        return None if timeout_s is None else max(deadline_s - time.monotonic(), LEFT_S)


class _MetaCollector(RedisCollector):
    """Collects stored results in the form that Celery's results cache."""

    def _answer(self, task_id: str, payload: bytes) -> Answer | None:
        meta = self._backend.decode(payload)
        assert meta["task_id"] == task_id
        return Answer(value=meta) if meta["status"] in states.READY_STATES else None


def send_many(
    task: Any, items: Sequence[Any], keywords: Mapping[str, Any], options: Mapping[str, Any]
) -> ResultSet:
    """Sends one job per item.

    Args:
        task: A task that is registered with its app.
        items: Each becomes a job of its own.
        keywords: Keyword arguments of all jobs.
        options: Options of `apply_async` for all jobs.

    Returns:
        The results, in the order of the items.

    Raises:
        OperationalError: kombu's; the broker stays away.
        PublishError: The broker refuses, or the class of the jobs is full.
    """
    # A caller waits, and Celery has no words for how long; `wait_s` is the publisher's.
    app, options = task.app, {"wait_s": 0, **options}
    ignored = options.get("ignore_result", task.ignore_result)
    trails = options.pop("add_to_parent", True)
    away_s = SEND_AWAY_S if options.pop("retry", None) is not False else 0.0
    policy, collector = RetryPolicy(away_s=away_s), None
    if not ignored and type(task.backend) is RedisBackend:
        # Its stream is made by whoever joins: a look at all jobs finds what ended before.
        collector = _MetaCollector(task.backend, policy)
        options["headers"] = {**collector.headers, **(options.get("headers") or {})}
    ids = uuids(len(items))
    try:
        with Publisher(
            app, task.name, keywords=keywords, outage_policy=policy, **options
        ) as publisher:
            publisher.send(list(zip(ids, items, strict=True)))
    except GaveUp as error:
        raise OperationalError(f"{task.name}: {error}") from error
    results = [task.AsyncResult(task_id) for task_id in ids]
    parent = app.current_worker_task if trails else None
    for result in results:
        result.ignored = ignored
        if parent is not None:
            parent.add_trail(result)
    return JobSet(results, collector, app=app)
