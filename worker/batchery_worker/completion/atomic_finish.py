"""Finishes jobs that the tracer has completed: messages, result and acknowledgement in one step."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from batchery.outbox import Outbox
from batchery.redis_scripts import RedisScripts, ScriptCall
from batchery_worker.commit.committer import (
    COMMIT_STATUSES,
    CommitStatus,
    database_of,
    result_scripts,
)
from batchery_worker.request import LeaseHandle


class HeldJob(NamedTuple):
    """A job whose messages and result are held back."""

    lease: LeaseHandle
    outbox: Outbox


class AtomicFinisher:
    """Finishes jobs in the Redis of a result backend that also has the broker's database."""

    def __init__(self, backend: Any) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's result backend for Redis, of the thread that finishes.
        """
        self._backend = backend
        #: Id of a worker that this Redis does not know, because the broker is another server.
        self._unknown = ""

    def finish(self, jobs: Sequence[HeldJob]) -> list[CommitStatus]:
        """Finishes each job completely or not at all; one round trip for all of them.

        Args:
            jobs: Jobs whose leases are in one lease store.

        Returns:
            One status per job; a job that needs the tracer must be replayed.

        Raises:
            redis.RedisError: Redis does not answer. It may have finished the jobs; a second call
                finds that out.
        """
        if not jobs or jobs[0].lease.store.worker == self._unknown:
            return [CommitStatus.NEEDS_TRACER] * len(jobs)
        answers = self._scripts.run_many("finish", [self._call(job) for job in jobs])
        if any(answer is None for answer in answers):
            self._unknown = jobs[0].lease.store.worker
        return [
            COMMIT_STATUSES[answer] if isinstance(answer, int) else CommitStatus.NEEDS_TRACER
            for answer in answers
        ]

    def _call(self, job: HeldJob) -> ScriptCall:
        store, outbox = job.lease.store, job.outbox
        keys = [
            *(store.keys.workers, store.lease_key, store.keys.dedupe_keys(outbox.publish_tag)),
            self._backend.get_key_for_task(outbox.task_id),
            *(held.queue_key for held in outbox.messages),
        ]
        expires_s = int(self._backend.expires or 0)
        args = [store.worker, self._db, store.db, expires_s, job.lease.token, outbox.result]
        return keys, [*args, *(held.text for held in outbox.messages)]

    @cached_property
    def _db(self) -> int:
        return database_of(self._backend.client)

    @cached_property
    def _scripts(self) -> RedisScripts:
        return result_scripts(self._backend.client)
