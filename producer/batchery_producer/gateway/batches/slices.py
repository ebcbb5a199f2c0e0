"""Sends the requests of a batch, slice by slice, and takes what comes back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from celery import Celery
from celery.utils.functional import chunks

from batchery.retry import RetryPolicy
from batchery_producer.answers import build_header
from batchery_producer.broker import REVOKE_CHUNK
from batchery_producer.collector import collector_for
from batchery_producer.files.records import Broken
from batchery_producer.gateway.batches.lines import REJECTED, BatchLines, Line, get_jobs
from batchery_producer.gateway.batches.records import BatchRecord
from batchery_producer.gateway.models.served_models import ServedModel
from batchery_producer.publisher import Publisher
from batchery_producer.run.file_run import InFlightRecovery
from batchery_producer.run.options import SubmitOptions

#: Slices in flight at once: while one is awaited, the next one is in the queue already.
AHEAD = 2

#: After so long without any result, in seconds, jobs are sent again that are in no queue and with
#: no worker: Redis has lost them.
STALL_S = 60.0

#: How much longer than the batch its jobs are worth running, in seconds, as clocks differ.
EXPIRY_GRACE_S = 60.0

#: How long sending may wait for space in a queue, in seconds; then another batch has its turn.
ROOM_WAIT_S = 1.0

#: How long one look for results takes, in seconds.
LOOK_S = 0.25


@dataclass(slots=True)
class Ended:
    """What has ended since it was last taken.

    Attributes:
        output: Lines of the output file.
        errors: Lines of the error file.
        lines: Numbers of these lines.
        completed: How many have a result.
        tokens: Their tokens.
        jobs: Ids of jobs whose results are not needed any more.
    """

    output: list[bytes]
    errors: list[bytes]
    lines: list[int]
    completed: int
    tokens: int
    jobs: list[str]

    @classmethod
    def nothing(cls) -> "Ended":
        """An empty one."""
        return cls([], [], [], 0, 0, [])


class SlicesInFlight:
    """The slices of a batch that one turn sends and awaits."""

    def __init__(
        self, app: Celery, model: ServedModel, record: BatchRecord, lines: BatchLines
    ) -> None:
        """Reads and sends nothing yet."""
        self._app = app
        self._record = record
        self._lines = lines
        self._queue = model.queue
        retries = RetryPolicy()
        options = SubmitOptions(
            priority=record.priority,
            tenant=record.tenant,
            expires_s=max(record.batch.expires_at - time.time(), 0) + EXPIRY_GRACE_S,
        )
        self._collector = collector_for(app, retries)
        self._publisher = Publisher(
            app,
            model.name,
            queue=model.queue,
            # As /v1/embeddings asks, so that its jobs share batches with these.
            keywords={"encoding": "base64"},
            outage_policy=retries,
            wait_s=ROOM_WAIT_S,
            persistent=True,
            **options.sending,
        )
        self._retries = retries
        #: Requests that have not ended, by slice and by the ids of their jobs.
        self._waiting: dict[int, dict[int, Line]] = {}
        self._by_job: dict[str, Line] = {}
        self.ended = Ended.nothing()

    def close(self) -> None:
        """Leaves in flight what is there."""
        self._collector.close()
        self._publisher.close()

    def load(self, number: int) -> None:
        """Awaits a slice, whose requests may have been sent.

        Raises:
            Problem: The file is gone.
        """
        if number in self._waiting:
            return
        waiting = self._waiting[number] = {}
        for line in self._lines.read(number):
            if isinstance(line, Broken):
                self._fail(line.line, self._lines.failure(line, REJECTED, line.reason))
                continue
            waiting[line.row.line] = line
            self._by_job |= dict.fromkeys(line.jobs, line)
        self._collector.expect(get_jobs(list(waiting.values())))

    def send(self, number: int, *, may_be_sent: bool) -> None:
        """Sends a slice that was loaded.

        Args:
            number: Which one.
            may_be_sent: Whether an earlier attempt may have sent some of it.
        """
        jobs = get_jobs(list(self._waiting[number].values()))
        self._send(self._missing(list(jobs)) if may_be_sent else list(jobs))

    def send_lost(self) -> None:
        """Sends what waits, and is in no queue and with no worker."""
        waiting = get_jobs([line for some in self._waiting.values() for line in some.values()])
        self._send(self._missing(list(waiting)))

    def _send(self, job_ids: Sequence[str]) -> None:
        jobs = [self._by_job[each].jobs[each] for each in job_ids]
        for count, group in groupby(jobs, key=lambda job: job.count):
            headers = build_header(count, self._collector.headers)
            self._publisher.send([(job.id, job.item) for job in group], headers)

    def _missing(self, job_ids: Sequence[str]) -> Sequence[str]:
        recovery = InFlightRecovery(
            self._app, self._queue, self._lines.journal.pattern, len(job_ids) + 1, self._retries
        )
        return recovery.missing(job_ids)

    def collect(self, wait_s: float = LOOK_S) -> bool:
        """Takes what has come back; False if that is nothing."""
        before = len(self.ended.lines)
        for job_id, answer in self._collector.collect(wait_s):
            self._take(job_id, answer)
        return len(self.ended.lines) > before

    def take_rest(self) -> list[str]:
        """Takes what is there by now; returns the ids of jobs that go on."""
        for job_id, answer in self._collector.poll_all():
            self._take(job_id, answer)
        return list(get_jobs([line for some in self._waiting.values() for line in some.values()]))

    def revoke(self, job_ids: Sequence[str]) -> None:
        """Tells workers not to begin some jobs."""
        control: Any = self._app.control
        for some in chunks(iter(job_ids), REVOKE_CHUNK):
            control.revoke(some)

    def is_done(self, number: int) -> bool:
        """Whether all requests of a slice that was loaded have ended."""
        return not self._waiting[number]

    def take_ended(self, keep: Callable[[Ended], None]) -> None:
        """Hands over what has ended; when that is kept, its results leave the backend."""
        ended, self.ended = self.ended, Ended.nothing()
        keep(ended)
        self._collector.forget(ended.jobs)

    def _take(self, job_id: str, answer: Any) -> None:
        line = self._by_job[job_id]
        line.answers[job_id] = answer
        if not line.is_done:
            return
        row = line.row
        answer = line.answer()
        if answer.error is not None:
            self._fail(row.line, self._lines.failure(row, *answer.error))
        else:
            content, tokens = self._lines.result(row, answer.value)
            self.ended.output.append(content)
            self.ended.lines.append(row.line)
            self.ended.completed += 1
            self.ended.tokens += tokens
        self.ended.jobs += line.jobs
        for waiting in self._waiting.values():
            waiting.pop(row.line, None)
        for each in line.jobs:
            del self._by_job[each]

    def _fail(self, number: int, content: bytes) -> None:
        self.ended.errors.append(content)
        self.ended.lines.append(number)
