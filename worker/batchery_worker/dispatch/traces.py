"""Spans of batches, for a worker that is traced."""

import logging
from collections.abc import Mapping
from time import monotonic
from typing import Any

from batchery.tracing import TracedBatch, TracedJob, current_tracing
from batchery_worker.in_flight import DispatchedBatch

logger = logging.getLogger("batchery.pool")


def trace_batch(dispatched: DispatchedBatch, info: Mapping[str, Any], *, error: str = "") -> None:
    """Makes the span of a batch that a device has answered, or died with; if somebody traces."""
    tracing = current_tracing()
    if tracing is None:
        return
    jobs = dispatched.batch.jobs
    calls = [job.payload for job in jobs]
    traced = [
        TracedJob(call.message, None if call.listened is None else call.listened.context)
        for call in calls
    ]
    duration_s = monotonic() - dispatched.dispatched_s
    try:
        tracing.batch(TracedBatch(jobs[0].key.task, traced, duration_s, info, error))
    except Exception:
        logger.exception("a batch of %s cannot be traced", jobs[0].key.task)
