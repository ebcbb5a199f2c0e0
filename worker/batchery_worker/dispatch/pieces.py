"""Which jobs of a batch are streamed, and what their device must know to write their pieces."""

from collections.abc import Sequence
from dataclasses import replace

from batchery.protocol.headers import HEADER, is_streamed
from batchery.settings import Settings
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import Job
from batchery_worker.request import get_lease_store
from batchery_worker.work import PieceContext


def piece_context(jobs: Sequence[Job[TaskCall]], settings: Settings) -> PieceContext | None:
    """Makes the context of a batch's pieces; None if nobody streams one of its jobs.

    Args:
        jobs: About to be dispatched.
        settings: Of the worker.
    """
    streamed = {
        index: job.payload
        for index, job in enumerate(jobs)
        if (header := job.payload.message.get(HEADER)) is not None and is_streamed(header)
    }
    if not streamed:
        return None
    leases = {index: call.lease for index, call in streamed.items()}
    store = get_lease_store(leases.values())
    context = PieceContext(
        tokens={
            index: "" if lease is None else lease.token
            for index, lease in leases.items()
            if store is None or (lease is not None and lease.store is store)
        },
        resumed=[call.task_id for call in streamed.values() if _may_have_run(call)],
        max_pieces=settings.stream_max_pieces,
        grace_s=settings.stream_grace_s,
    )
    if store is None:
        return context
    return replace(
        context,
        worker=store.worker,
        workers_key=store.keys.workers,
        lease_key=store.lease_key,
        broker_db=store.db,
    )


def _may_have_run(call: TaskCall) -> bool:
    """Whether a job has been on a device before: here, in another worker, or before a retry."""
    if call.is_plain:
        return call.accepted or bool(call.message.get("retries"))
    delivery = {} if call.request is None else call.request.delivery_info
    again = delivery.get("redelivered") or call.message.get("retries")
    return call.accepted or bool(again)
