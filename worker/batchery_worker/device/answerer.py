"""From the outcomes of a batch to what becomes of each job, by way of the commit.

The results of a short batch are sent, and the next batch runs while Redis stores them: the first
one is settled before the results of the next one are sent, or before the device waits.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery import Celery
from celery.utils.saferepr import saferepr
from kombu.utils import json as celery_json

from batchery.errors import UnserialisableResult
from batchery.execution.batch import read_back, refuse_value
from batchery.execution.bisect_failures import NON_VALUES
from batchery.outcomes import Failed, Replace
from batchery.protocol import headers as multi_item
from batchery.transport.codec import read_json
from batchery_worker.batch import DeviceBatch, JobAnswer
from batchery_worker.commit.committer import CommitStatus, JobResult, RedisCommitter
from batchery_worker.device.pieces import PieceWriter
from batchery_worker.ipc.messages import Reply, ResultsWait
from batchery_worker.plain_values import Encoded, encoded, is_plain, joined, plain_json
from batchery_worker.result_cache import SingleFlight
from batchery_worker.work import Work

#: How the entry of an item begins that has failed.
ERROR = b'{"error":'


class Answerer:
    """Has the batches of a device answered: at once, or on the commit thread."""

    def __init__(
        self,
        app: Celery,
        device: str,
        reuse: SingleFlight,
        pieces: PieceWriter,
        tell: Callable[[Reply], None],
        settle: Callable[[DeviceBatch], None],
    ) -> None:
        """Does not connect yet.

        Args:
            app: The device's; results go to its backend.
            device: Name of the device.
            reuse: Keeps results that other jobs may share.
            pieces: Writes partial results.
            tell: Sends a message to the worker.
            settle: Settles the jobs of a batch that is answered; on any thread.
        """
        self._device = device
        self._reuse = reuse
        self._pieces = pieces
        self._tell = tell
        self._settle = settle
        self._committer = RedisCommitter(app.backend, self._say_waiting)
        self._computed: queue.SimpleQueue[DeviceBatch] = queue.SimpleQueue()
        #: Number of batches given to the commit thread, and answered by it; one thread writes each.
        self._given = self._answered = 0
        #: Id of the batch that is being committed.
        self._committing = 0
        #: Answers the batch whose results were sent; None if there is none. For who has the lock.
        self._finish_sent: Callable[[], None] | None = None
        self._sending = threading.RLock()

    def hand_over(self, batch: DeviceBatch, *, at_once: bool) -> None:
        """Takes a batch that was computed.

        Args:
            batch: The batch.
            at_once: Whether this thread answers it, if none is before it.
        """
        if batch.work.is_timed:
            # Its time must not count while it waits for Redis, or behind one that does.
            self._tell(ResultsWait(batch.work.id))
        with self._sending:
            self.answer_sent()
            if at_once and self._given == self._answered:
                self._finish_sent = self._send(batch)
            else:
                self._given += 1
                self._computed.put(batch)

    def answer_sent(self) -> bool:
        """Answers the batch whose results were sent; whether there was one. From any thread."""
        with self._sending:
            finish, self._finish_sent = self._finish_sent, None
            if finish is not None:
                finish()
        return finish is not None

    def run(self) -> None:
        """The commit thread's work."""
        while True:
            self._send(self._computed.get())()
            self._answered += 1

    def _send(self, batch: DeviceBatch) -> Callable[[], None]:
        """Sends the results of a batch; returns what answers it."""
        self._committing = batch.work.id
        batch.queued_ms += (time.perf_counter() - batch.ended_s) * 1e3
        is_streamed = batch.work.pieces is not None
        if is_streamed:
            self._pieces.flush(batch.work)
        answer = send_results(batch, self._device, self._committer, self._reuse)

        def finish() -> None:
            answer()
            self._settle(batch)
            if is_streamed:
                self._pieces.end(batch.work, [each.status for each in batch.answers])

        return finish

    def _say_waiting(self) -> None:
        self._tell(ResultsWait(self._committing))


def send_results(
    batch: DeviceBatch, device: str, committer: RedisCommitter, reuse: SingleFlight
) -> Callable[[], None]:
    """Sends what can be committed.

    Args:
        batch: The batch, computed, or dropped.
        device: Its name, as torch spells it.
        committer: Used if the batch has a commit context.
        reuse: Caches the results of a batch whose items share results.

    Returns:
        Reads the answer, and notes what became of each job.
    """
    started_s = time.perf_counter()
    batch.info = describe(batch, device)
    if batch.dropped is not None:
        batch.answers = [JobAnswer(batch.dropped)] * len(batch.work.jobs)
        return lambda: None
    work, context = batch.work, batch.work.commit
    if batch.deduped is not None:
        batch.outcomes = batch.deduped.encode()
    outcomes, results = list[Any](), list[JobResult]()
    packed = () if context is None else context.packed
    for index, ((task_id, _, _), outcome) in enumerate(zip(work.jobs, _by_job(batch), strict=True)):
        is_packed = index in packed and isinstance(outcome, Encoded) and outcome.has_vectors
        json = outcome.packed if is_packed else write_json(outcome)
        outcomes.append(json if isinstance(json, Failed) else outcome)
        own = None if isinstance(json, Failed) else json
        results.append(JobResult(task_id, own, is_packed=is_packed))
    read_statuses = None if context is None else committer.send(results, context, batch.info)

    def answer() -> None:
        if context is None or read_statuses is None:
            batch.answers = [JobAnswer(CommitStatus.NEEDS_TRACER, each) for each in outcomes]
        else:
            chars, is_listened = context.text_chars, context.is_listened
            batch.answers = [
                _answer_job(status, outcome, chars, is_listened=is_listened)
                for status, outcome in zip(read_statuses(), outcomes, strict=True)
            ]
        # The callers came first: they wait.
        if batch.deduped is not None:
            batch.reused = reuse.keep(batch.deduped, work)
        batch.failed_items = _failed_items(work, outcomes)
        batch.commit_ms = (time.perf_counter() - started_s) * 1e3

    return answer


def write_json(outcome: Any) -> bytes | Failed | None:
    """The JSON of a result; None for an outcome that is none.

    What can be sent nowhere, neither as a result nor as another job, becomes a failure that says
    so.
    """
    try:
        if isinstance(outcome, Encoded):
            return outcome.json
        if isinstance(outcome, Replace):
            celery_json.dumps(outcome.signature)
        elif not isinstance(outcome, NON_VALUES):
            written = plain_json(outcome) if is_plain(outcome) else celery_json.dumps(outcome)
            return written if isinstance(written, bytes) else written.encode()
    except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
        if not isinstance(outcome, Replace):
            return refuse_value(outcome, error)
        text = f"Replace({outcome.signature!r:.200}): JSON cannot write it ({error})"
        return Failed(UnserialisableResult(text))
    return None


def describe(batch: DeviceBatch, device: str) -> dict[str, Any]:
    """Facts of a batch, which are stored with each result."""
    tokens, computed = batch.tokens, batch.computed_tokens
    return {
        "id": f"b{batch.work.id}",
        "size": sum(len(items) for _, items, _ in batch.work.jobs),
        "padding": round(1 - tokens / computed, 4) if computed else 0.0,
        "prepare_ms": round(batch.prepare_ms, 3),
        "queued_ms": round(batch.queued_ms, 3),
        "forward_ms": round(batch.forward_ms, 3),
        "device": device,
        **({"version": batch.version} if batch.version else {}),
    }


def _failed_items(work: Work, outcomes: Sequence[Any]) -> dict[str, int]:
    """Counts failed items of multi-item jobs, by class of the error."""
    failed: Counter[str] = Counter()
    for (_, _, form), outcome in zip(work.jobs, outcomes, strict=True):
        if form is not True:
            continue
        if type(outcome) is Encoded:
            # To look for the key costs little; to decode the vectors would cost much.
            has_failed = any(isinstance(each, bytes) and ERROR in each for each in outcome.parts)
            entries = read_json(outcome.packed) if has_failed else ()
        else:
            entries = outcome
        failed.update(entry["error"]["type"] for entry in entries if "error" in entry)
    return dict(failed)


def _answer_job(
    status: CommitStatus, outcome: Any, chars: int | None, *, is_listened: bool
) -> JobAnswer:
    """What is still needed of a job's outcome."""
    if status is CommitStatus.NEEDS_TRACER:
        return JobAnswer(status, outcome)
    if status is not CommitStatus.COMMITTED:
        return JobAnswer(status)
    text = None if chars is None else format_result(outcome, chars)
    return JobAnswer(status, outcome if is_listened else None, text, is_listened)


def format_result(outcome: Any, chars: int) -> str:
    """What Celery shows of a result, in roughly so many characters.

    Celery's `saferepr` reads a whole list to show its head, so here it gets only the head.
    """
    if isinstance(outcome, Encoded):
        try:
            outcome = outcome.value
        except Exception:  # noqa: BLE001 - a type that the app had when the result was kept
            return str(outcome.json[:chars], errors="replace")
    # One more element than can be shown: each takes a digit, a comma and a space at least.
    shown = chars // 3 + 2
    if type(outcome) is dict:
        return saferepr({key: _head(value, shown) for key, value in outcome.items()}, chars)
    return saferepr(_head(outcome, shown), chars)


def _head(value: Any, count: int) -> Any:
    return value[:count] if type(value) is list else value


def _by_job(batch: DeviceBatch) -> Iterator[Any]:
    """Groups the outcomes of the items by the jobs that carried them."""
    start = 0
    for _, items, form in batch.work.jobs:
        part = batch.outcomes[start : start + len(items)]
        yield (
            _collect_values(part)
            if form == "values"
            else _multi_item_outcome(part)
            if form
            else part[0]
        )
        start += len(items)


def sendable(outcome: Any) -> Any:
    """The outcome of one item of a multi-item job; a failure if JSON cannot write it."""
    return outcome if is_plain(outcome) else read_back(outcome)


def _collect_values(outcomes: Sequence[Any]) -> Any:
    """The outcome of a multi-item job whose result is the list of the values."""
    if all(type(each) is Encoded for each in outcomes):
        return joined(outcomes)
    decoded = [each.value if type(each) is Encoded else each for each in outcomes]
    return multi_item.build_outcome(decoded, "values")


def _multi_item_outcome(outcomes: Sequence[Any]) -> Any:
    """The outcome of a multi-item job, made of the outcomes of its items."""
    if not any(type(each) is Encoded for each in outcomes):
        return multi_item.build_result(list(map(sendable, outcomes)))
    entries = [_entry(each) for each in outcomes]
    if None not in entries:
        return joined([entry for entry in entries if entry is not None])
    return _multi_item_outcome([each.value if type(each) is Encoded else each for each in outcomes])


def _entry(outcome: Any) -> Encoded | None:
    """The outcome of one item of a multi-item job, encoded; None if Celery must encode it."""
    if type(outcome) is Encoded:
        return Encoded(b'{"ok":', *outcome.parts, b"}")
    (entry,) = multi_item.build_result([sendable(outcome)])
    return encoded(entry)
