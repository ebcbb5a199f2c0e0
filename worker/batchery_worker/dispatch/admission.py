"""From one of Celery's requests to a job of the scheduler, or to a clear refusal."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kombu.utils import json

from batchery.errors import BatchArgumentError
from batchery.protocol import headers as multi_item
from batchery.protocol.headers import HEADER, read_deadline, read_sent_at, read_tenant
from batchery.settings import LOWEST_PRIORITY, Settings
from batchery.task import BatchTask, only_item
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import BatchKey, Job, Lane, Limits, TimeLimits
from batchery_worker.work import CachePolicy


class TaskOptions(NamedTuple):
    """What a worker must know of a task for each of its batches."""

    limits: Limits
    #: The token budget; None lets the device choose.
    max_batch_tokens: int | None
    #: How results are cached; None if they are not.
    cache: CachePolicy | None
    #: Whether a device needs the headers of jobs: for `self.request`, or for STARTED.
    needs_context: bool


class Admission:
    """Reads calls; knows the limits of every task."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        """Has read no call.

        Args:
            settings: Of the worker.
            clock: Unix seconds, in which callers give deadlines.
        """
        self._settings = settings
        self._clock = clock
        self._options: dict[str, TaskOptions] = {}
        #: By priority, of jobs without a tenant.
        self._lanes = [Lane(settings.find_class(each), "") for each in range(LOWEST_PRIORITY + 1)]

    def options(self, task: BatchTask) -> TaskOptions:
        """The options of a task: its own, or those of the settings."""
        known = self._options.get(task.name)
        if known is not None:
            return known
        settings = self._settings
        # An item in slots shares each step with others, and has no batch that could be smaller.
        target_ms = None if task.slots else task.target_latency_ms or settings.target_latency_ms
        wait_ms = settings.max_wait_ms if task.max_wait_ms is None else task.max_wait_ms
        ttl_s = task.cache_ttl_s or settings.cache_ttl_s
        self._options[task.name] = found = TaskOptions(
            limits=Limits(
                max_batch_size=task.max_batch_size or settings.max_batch_size,
                max_wait_s=wait_ms / 1e3,
                target_s=target_ms and target_ms / 1e3,
            ),
            max_batch_tokens=task.max_batch_tokens or settings.max_batch_tokens,
            cache=CachePolicy(task.cache, ttl_s) if task.cache else None,
            needs_context=task.sees_request or bool(task.track_started),
        )
        return found

    def job(
        self,
        call: TaskCall,
        task: BatchTask,
        time_limits: TimeLimits,
        now_s: float,
    ) -> Job[TaskCall]:
        """Makes a job of a call, and fills in the call's items and context.

        Args:
            call: As it came from Celery.
            task: The task that it names.
            time_limits: Soft and hard limit in seconds; part of the batch key.
            now_s: When it came, on the scheduler's clock.

        Returns:
            The job.

        Raises:
            InvalidItem: A header of ours is malformed, or does not fit the argument.
        """
        message = call.message
        argument = only_item(task.name, message.get("args") or ())
        header = message.get(HEADER)
        call.items, call.is_multi_item = multi_item.read_items(argument, header)
        keywords = message.get("kwargs")
        options = self.options(task)
        if options.needs_context:
            # With what follows in a chain, and callbacks.
            call.context = {**(call.embed or {}), **message}
        unix_s = self._clock()
        return Job(
            id=call.task_id,
            # In slots jobs of all keywords run beside each other, so they are one line.
            key=BatchKey(
                task.name,
                "" if task.slots else encode_keywords(keywords),
                time_limits,
                0 if call.lease is None else call.lease.store.shard,
            ),
            limits=options.limits,
            items=len(call.items),
            arrived_s=now_s,
            payload=call,
            lane=self._lane(message),
            deadline_s=now_s + read_deadline(message) - unix_s,
            # A job with an ETA is wanted only then, and that is when Celery hands it over.
            waited_s=0.0 if message.get("eta") else unix_s - read_sent_at(message, unix_s),
        )

    def _lane(self, message: Mapping[str, Any]) -> Lane:
        delivery: Any = message.get("delivery_info") or {}
        return self.find_lane(delivery.get("priority"), read_tenant(message))

    def find_lane(self, priority: Any, tenant: str) -> Lane:
        """The lane of jobs with a priority, as their message has it, and of a tenant."""
        if type(priority) is not int:
            priority = 0
        lane = self._lanes[max(0, min(priority, LOWEST_PRIORITY))]
        return Lane(lane.priority_class, tenant) if tenant else lane


def encode_keywords(keywords: Mapping[str, Any] | None) -> str:
    """Spells keywords so that equal ones are spelled equally, in any order.

    Raises:
        BatchArgumentError: They cannot be spelled.
    """
    try:
        return json.dumps(keywords, sort_keys=True) if keywords else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise BatchArgumentError(
            f"the keyword arguments cannot be written as JSON, so no batch can be chosen: {error}"
        ) from None
