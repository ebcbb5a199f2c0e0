"""Finishes jobs that the tracer has completed: messages, result and acknowledgement in one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import redis

from batchery_worker.capture import Capture
from batchery_worker.commit import Verdict
from batchery_worker.redis_commit import VERDICTS, database_of, script_text
from batchery_worker.request import Lease


@dataclass(frozen=True, slots=True)
class Finish:
    """One job that is to be finished."""

    task_id: str
    lease: Lease
    #: Tag of its message.
    publish_tag: str
    capture: Capture


class Finisher:
    """Finishes jobs in the Redis of a result backend, in which the broker's database is, too."""

    def __init__(self, backend: Any) -> None:
        """Does not connect yet.

        Args:
            backend: Celery's own for Redis, of the thread that finishes.
        """
        self._backend = backend
        #: Id of a worker that this Redis does not know, as the broker is another server.
        self._unknown = ""

    def finish(self, jobs: Sequence[Finish]) -> list[Verdict]:
        """Finishes jobs, each of them wholly or not at all; one round trip.

        Args:
            jobs: Whose leases are of one ledger.

        Returns:
            One verdict per job; what needs the tracer is to be replayed.

        Raises:
            redis.RedisError: Redis does not answer. Nobody knows what it has done: a second call
                finds that out.
        """
        if not jobs or jobs[0].lease.ledger.worker == self._unknown:
            return [Verdict.NEEDS_TRACER] * len(jobs)
        answers = self._run([self._command(job) for job in jobs])
        if any(answer is None for answer in answers):
            self._unknown = jobs[0].lease.ledger.worker
        return [
            VERDICTS[answer] if isinstance(answer, int) else Verdict.NEEDS_TRACER
            for answer in answers
        ]

    def _run(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        for _ in range(2):
            with self._client.pipeline(transaction=False) as pipe:
                for keys, *rest in commands:
                    pipe.evalsha(self._script.sha, keys, *rest)
                answers: list[Any] = pipe.execute(raise_on_error=False)
            if not any(isinstance(each, redis.exceptions.NoScriptError) for each in answers):
                break
            # A new server, or one that has forgotten. What did run says so when it runs again.
            self._client.script_load(self._script.script)
        return answers

    def _command(self, job: Finish) -> list[Any]:
        ledger, messages = job.lease.ledger, job.capture.messages
        keys = [
            *(ledger.keys.workers, ledger.lease_key, ledger.keys.sent(job.publish_tag)),
            self._backend.get_key_for_task(job.task_id),
            *(message.queue_key for message in messages),
        ]
        expires_s = int(self._backend.expires or 0)
        args = [ledger.worker, self._db, ledger.db, expires_s, job.lease.token, job.capture.value]
        return [len(keys), *keys, *args, *(message.text for message in messages)]

    @cached_property
    def _client(self) -> Any:
        return self._backend.client

    @cached_property
    def _db(self) -> int:
        return database_of(self._client)

    @cached_property
    def _script(self) -> Any:
        return self._client.register_script(script_text("finish"))
