"""From the outcomes of a batch to the message that answers it, by way of the commit."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery.utils.saferepr import saferepr

from batchery.protocol import headers as multi_item
from batchery_worker.commit.committer import CommitStatus, EncodedOutcome, RedisCommitter
from batchery_worker.device.served_model import LoadedModel
from batchery_worker.ipc.messages import Done, Work, batch_info, encode_outcome, sendable
from batchery_worker.ipc.values import Encoded, encoded, joined
from batchery_worker.result_cache import DedupedBatch, SingleFlight


@dataclass(slots=True)
class DeviceBatch:
    """A batch on its way through the threads of a device."""

    work: Work
    #: The items that have to be computed, prepared.
    items: list[Any]
    #: Its model; None for a function, or if the model is not loaded yet.
    served: LoadedModel | None = None
    #: Which items share a result; None if each item is computed.
    deduped: DedupedBatch | None = None
    prepare_ms: float = 0.0
    #: When its last stage ended, on the clock of `time.perf_counter`.
    ended_s: float = 0.0
    #: One outcome per item, once it is computed.
    outcomes: Sequence[Any] = ()
    forward_ms: float = 0.0
    tokens: int = 0
    computed_tokens: int = 0
    #: See `LoadedModel.version`.
    version: str = ""
    #: How long it has waited for threads so far.
    queued_ms: float = 0.0
    #: Why it has no outcomes, if it is the job of slots that it had to leave.
    dropped: CommitStatus | None = None
    #: See `Done`, as for the next ones.
    figures: Mapping[str, Any] | None = None
    texts: Sequence[tuple[Any, ...]] = ()


def answer(
    batch: DeviceBatch,
    device: str,
    committer: RedisCommitter,
    backend: Any,
    reuse: SingleFlight | None = None,
) -> Done:
    """Commits what can be committed, and says what became of each job.

    Args:
        batch: The batch, computed.
        device: Its name in torch.
        committer: Used if the batch has a commit context.
        backend: Knows how exceptions are stored.
        reuse: Caches the results of a batch whose items share results.
    """
    started_s = time.perf_counter()
    work, context = batch.work, batch.work.commit
    if batch.deduped is not None:
        batch.outcomes = batch.deduped.encode()
    outcomes = list(_by_job(batch))
    settled = [
        EncodedOutcome(task_id, encode_outcome(outcome, backend))
        for (task_id, _, _), outcome in zip(work.jobs, outcomes, strict=True)
    ]
    statuses: Sequence[CommitStatus] = [CommitStatus.NEEDS_TRACER] * len(settled)
    chars, is_listened = None, False
    names = ("prepare_ms", "queued_ms", "forward_ms", "tokens", "computed_tokens", "version")
    facts: dict[str, Any] = {name: getattr(batch, name) for name in names}
    if context is not None:
        chars, is_listened = context.text_chars, context.is_listened
        info = batch_info(batch_id=work.id, device=device, size=len(batch.outcomes), **facts)
        statuses = committer.commit(settled, context, info)
    # The callers came first: they wait.
    deduped = batch.deduped
    reused = reuse.keep(deduped, work) if deduped is not None and reuse is not None else None
    return Done(
        id=work.id,
        jobs=[
            (status.value, _rest(status, job, outcome, chars, is_listened=is_listened))
            for status, job, outcome in zip(statuses, settled, outcomes, strict=True)
        ],
        commit_ms=(time.perf_counter() - started_s) * 1e3,
        figures=batch.figures,
        reused=reused,
        failed_items=_failed_items(work, outcomes),
        texts=batch.texts,
        **facts,
    )


def report_dropped(batch: DeviceBatch, status: CommitStatus) -> Done:
    """Says that the jobs of a batch ended before their time, and have no outcome."""
    jobs = [(status.value, ()) for _ in batch.work.jobs]
    return Done(batch.work.id, jobs, batch.forward_ms, 0, 0, figures=batch.figures)


def _failed_items(work: Work, outcomes: Sequence[Any]) -> dict[str, int] | None:
    """Counts failed items of multi-item jobs, by class of the error; None if none failed."""
    failed: Counter[str] = Counter()
    for (_, _, form), outcome in zip(work.jobs, outcomes, strict=True):
        if form is not True:
            continue
        if type(outcome) is Encoded:
            # To look for the key costs little; to decode the vectors would cost much.
            entries = outcome.value if b'{"error":' in outcome.json else ()
        else:
            entries = outcome
        failed.update(entry["error"]["type"] for entry in entries if "error" in entry)
    return dict(failed) or None


def _rest(
    status: CommitStatus,
    job: EncodedOutcome,
    outcome: Any,
    chars: int | None,
    *,
    is_listened: bool,
) -> tuple[Any, ...]:
    """What the main process still has to know of a job's outcome."""
    if status is CommitStatus.NEEDS_TRACER:
        return tuple(job.spelled)
    if status is not CommitStatus.COMMITTED:
        return ()
    text = None if chars is None else format_result(outcome, chars)
    if is_listened:
        return (text, *job.spelled)
    return () if text is None else (text,)


def format_result(outcome: Any, chars: int) -> str:
    """What Celery shows of a result, in roughly so many characters.

    Celery's `saferepr` reads a whole list to show its head, so here it gets only the head.
    """
    if isinstance(outcome, Encoded):
        try:
            outcome = outcome.head(chars)
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
        return Encoded(b'{"ok":%b}' % outcome.json)
    (entry,) = multi_item.build_result([sendable(outcome)])
    return encoded(entry)
