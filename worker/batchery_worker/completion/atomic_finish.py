"""Finishes jobs that the tracer has completed: messages, result and acknowledgement in one step.

If the result backend is another server than the broker, there are two steps: the result first, then
messages and acknowledgement. Parts of chords take these steps, too, and are counted in between.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from batchery.completion import Outbox
from batchery.redis_scripts import RedisScripts, ScriptCall, get_database
from batchery.transport.lease_store import LeaseStore
from batchery_worker.commit.committer import (
    COMMIT_STATUSES,
    CommitStatus,
    result_scripts,
)
from batchery_worker.completion.backend import DeadlineRetry
from batchery_worker.request import LeaseHandle

T = TypeVar("T")

COMMITTED, FENCED, NEEDS_TRACER = (
    CommitStatus.COMMITTED,
    CommitStatus.FENCED,
    CommitStatus.NEEDS_TRACER,
)


class WithheldJob(NamedTuple):
    """A job whose messages and result are held back."""

    lease: LeaseHandle
    outbox: Outbox


class AtomicFinisher:
    """Finishes jobs in the Redis of a result backend, and in that of the broker if it differs."""

    def __init__(self, backend: Any) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's result backend for Redis, of the thread that finishes.
        """
        self._backend = backend
        #: Id of a worker that the backend's server does not know.
        self._elsewhere = ""
        #: Id of a worker that the broker does not know either: it is fenced.
        self._unknown = ""

    def finish(self, jobs: Sequence[WithheldJob]) -> list[CommitStatus]:
        """Finishes each job completely or not at all; one round trip per step for all of them.

        Args:
            jobs: Jobs whose leases are in one lease store.

        Returns:
            One status per job; a job that needs the tracer must be replayed.

        Raises:
            redis.RedisError: Redis does not answer. It may have finished the jobs; a second call
                finds that out.
        """
        statuses: dict[str, CommitStatus] = {}
        for is_part in (False, True):
            some = [job for job in jobs if bool(job.outbox.part_calls) == is_part]
            statuses |= zip((job.lease.token for job in some), self._finish(some), strict=True)
        return [statuses[job.lease.token] for job in jobs]

    def _finish(self, jobs: Sequence[WithheldJob]) -> list[CommitStatus]:
        """Finishes jobs all or none of which are parts of chords."""
        if not jobs or jobs[0].lease.store.worker == self._unknown:
            return [NEEDS_TRACER] * len(jobs)
        store = jobs[0].lease.store
        if store.worker != self._elsewhere and not jobs[0].outbox.part_calls:
            calls = [self._call(job, self._db, job.outbox.result) for job in jobs]
            answers = self._scripts.run_many("finish", calls)
            if answers[0] is not None:
                return [_status(answer) for answer in answers]
            self._elsewhere = store.worker
        return self._finish_in_steps(store, jobs)

    def _finish_in_steps(
        self, store: LeaseStore, jobs: Sequence[WithheldJob]
    ) -> list[CommitStatus]:
        """Finishes jobs whose leases are on another server than their results, or parts of chords.

        If the worker dies after the first step, the jobs run again. Their results are stored
        already, and only their messages are left to publish. A part of a chord counts once, however
        often it runs; the last one is left to the tracer, which sends the body.
        """
        broker = result_scripts(store.client)
        tokens = [job.lease.token for job in jobs]
        keys = (store.keys.workers, store.lease_key)
        held = _patiently(lambda: broker.run("held", keys, store.worker, " ".join(tokens)))
        if held is None:
            self._unknown = store.worker
            return [NEEDS_TRACER] * len(jobs)
        ours = [job for job, digit in zip(jobs, held, strict=True) if digit == ord("1")]
        statuses = dict.fromkeys(tokens, FENCED)
        statuses |= dict.fromkeys(self._store(ours), NEEDS_TRACER)
        stored = [job for job in ours if statuses[job.lease.token] is FENCED]
        statuses |= dict.fromkeys(self._count(stored), NEEDS_TRACER)
        ready = [job for job in ours if statuses[job.lease.token] is FENCED]
        calls = [self._call(job, store.db, b"") for job in ready]
        answers = _patiently(lambda: broker.run_many("finish", calls)) if calls else []
        for job, answer in zip(ready, answers, strict=True):
            statuses[job.lease.token] = _status(answer)
        # The lease of a job may be gone because an answer was lost: then its result is this one.
        gone = [job for job in jobs if statuses[job.lease.token] is FENCED and job.outbox.result]
        for job, result in zip(gone, self._stored(gone), strict=True):
            if result == _as_bytes(job.outbox.result):
                statuses[job.lease.token] = COMMITTED
        return [statuses[token] for token in tokens]

    def _store(self, jobs: Sequence[WithheldJob]) -> list[str]:
        """Stores results; returns the tokens of jobs that the script leaves to the tracer."""
        outboxes = [(job.lease.token, job.outbox) for job in jobs if job.outbox.result]
        calls = [([self._key(outbox)], [outbox.expires_s, outbox.result]) for _, outbox in outboxes]
        answers = self._scripts.run_many("store", calls) if calls else []
        return [
            token
            for (token, _), answer in zip(outboxes, answers, strict=True)
            if _status(answer) is NEEDS_TRACER
        ]

    def _count(self, jobs: Sequence[WithheldJob]) -> list[str]:
        """Counts parts of chords; returns the tokens of jobs that are left to the tracer."""
        calls = [(job.lease.token, call) for job in jobs for call in job.outbox.part_calls]
        if not calls:
            return []
        counted = self._backend.count_parts([call for _, call in calls])
        return [token for (token, _), done in zip(calls, counted, strict=True) if not done]

    def _stored(self, jobs: Sequence[WithheldJob]) -> Sequence[Any]:
        keys = [self._key(job.outbox) for job in jobs]
        stored: Sequence[Any] = self._backend.client.mget(keys) if keys else ()
        return stored

    def _call(self, job: WithheldJob, results_db: int, result: bytes | str) -> ScriptCall:
        store, outbox = job.lease.store, job.outbox
        keys = [
            *(store.keys.workers, store.lease_key, store.keys.dedupe_keys(outbox.publish_tag)),
            self._key(outbox),
            *(held.queue_key for held in outbox.messages),
        ]
        args = [store.worker, results_db, store.db, outbox.expires_s, job.lease.token, result]
        return keys, [*args, *(held.text for held in outbox.messages)]

    def _key(self, outbox: Outbox) -> Any:
        return self._backend.get_key_for_task(outbox.task_id)

    @cached_property
    def _db(self) -> int:
        return get_database(self._backend.client.connection_pool)

    @cached_property
    def _scripts(self) -> RedisScripts:
        return result_scripts(self._backend.client)


def _status(answer: Any) -> CommitStatus:
    """What a script says of one job; nil and errors leave it to the tracer."""
    is_digit = isinstance(answer, int | str | bytes)
    return COMMIT_STATUSES[int(answer)] if is_digit else NEEDS_TRACER


def _as_bytes(result: bytes | str) -> bytes:
    return result.encode() if isinstance(result, str) else result


def _patiently(command: Callable[[], T]) -> T:
    """Sends a command to the broker with the retries that the backend's client has."""
    answer: T = DeadlineRetry(None).call_with_retry(command, lambda _: None)
    return answer
