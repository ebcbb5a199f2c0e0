"""Records the jobs that a worker admits, for those who ask. Pure: clocks are arguments.

Nobody asks most of the time. Then a job is counted, and nothing else.
"""

import math
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any
from uuid import uuid4

from batchery.protocol.figures import RecordedJob
from batchery.protocol.headers import DIGITS, SENT_AT, read_sent_at
from batchery_worker.job import Job

#: How long a worker records after it was asked, in seconds: then whoever asked is gone.
LEASE_S = 10.0

#: Maximum number of jobs that are kept for whoever asks; they take 15 MB. A recorder misses jobs,
#: and is told how many, if more than these come from one of its questions to the next.
MAX_ROWS = 50_000

#: Maximum number of jobs in one answer: the worker does nothing else for 30 ms meanwhile.
MAX_ANSWER_ROWS = 10_000


class JobRecorder:
    """The last jobs of a worker, numbered in the order in which they were admitted.

    Each caller has its own place among them, so that several may record at once.
    """

    def __init__(self, now_s: float, clock: Callable[[], float] = time.time) -> None:
        """Records nothing yet.

        Args:
            now_s: The time, on the scheduler's clock.
            clock: Unix seconds, in which callers say when they send.
        """
        self._began_s = now_s
        self._clock = clock
        #: Another one after a restart, when the numbers begin anew.
        self._id = uuid4().hex
        #: Number of the last job.
        self._admitted = 0
        self._until_s: float | None = None
        #: Each with its number in front. Remote control may ask on another thread.
        self._rows: deque[tuple[int, RecordedJob]] = deque(maxlen=MAX_ROWS)
        self._max_batch_sizes: dict[str, int] = {}

    def note(self, job: Job[Any], message: Mapping[str, Any]) -> None:
        """Counts a job that was admitted, and keeps it while somebody records.

        Args:
            job: The job; it arrives now.
            message: Its headers.
        """
        if self._until_s is not None:
            self._keep(job, message)
        # Only now, so that whoever sees the number also sees the row.
        self._admitted += 1

    def poll(self, recorder: str | None, after: int, now_s: float) -> dict[str, Any]:
        """The jobs since a caller's last call; goes on recording for `LEASE_S`.

        Args:
            recorder: From the last answer to this caller; None for its first call, which is
                answered without jobs: it says from where the caller records.
            after: The same.
            now_s: The time, on the scheduler's clock.

        Returns:
            The next `recorder` and `after`; `age_s`, since the worker's start; `rows`, each a
            `RecordedJob`; how many were `missed`, since nobody asked or too many came; how many are
            `left` for the next call; `max_batch_sizes` by task.
        """
        admitted = self._admitted
        self._until_s = now_s + LEASE_S
        if recorder is None:
            after = admitted
        elif recorder != self._id:
            # All jobs of this process are new to the caller.
            after = 0
        kept, number = list(self._rows), itemgetter(0)
        held = kept[bisect(kept, after, key=number) : bisect(kept, admitted, key=number)]
        rows = held[:MAX_ANSWER_ROWS]
        upto = admitted if len(rows) == len(held) else rows[-1][0]
        return {
            "recorder": self._id,
            "after": upto,
            "age_s": round(now_s - self._began_s, DIGITS),
            "rows": [row for _, row in rows],
            "missed": upto - after - len(rows),
            "left": len(held) - len(rows),
            "max_batch_sizes": dict(self._max_batch_sizes),
        }

    def _keep(self, job: Job[Any], message: Mapping[str, Any]) -> None:
        if self._until_s is None or job.arrived_s >= self._until_s:
            self._until_s = None
            self._rows.clear()
            return
        now_s = self._clock()
        # A job with an ETA is wanted only then, and that is when Celery hands it over.
        sent_s = now_s if message.get("eta") else read_sent_at(message, now_s)
        deadline_s = None
        if job.deadline_s < math.inf:
            deadline_s = round(max(0.0, job.deadline_s - job.arrived_s + now_s - sent_s), DIGITS)
        self._max_batch_sizes[job.key.task] = job.limits.max_batch_size
        row = RecordedJob(
            round(sent_s, DIGITS),
            job.key.task,
            job.lane.priority_class,
            job.lane.tenant,
            job.items,
            deadline_s,
            f"{job.id} {message.get(SENT_AT)!r:.40}",
        )
        self._rows.append((self._admitted + 1, row))
