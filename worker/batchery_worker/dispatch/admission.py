"""From one of Celery's requests to a job of the scheduler, or to a clear refusal."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from kombu.utils import json

from batchery.errors import BatchArgumentError, InvalidItem
from batchery.protocol import multi_item
from batchery.protocol.headers import HEADER, read_deadline, read_tenant
from batchery.settings import LOWEST_PRIORITY, Settings
from batchery.task import BatchTask, only_item
from batchery_worker.ipc.commit_context import CachePolicy
from batchery_worker.ipc.messages import dump_context
from batchery_worker.ipc.values import why_unportable
from batchery_worker.job import BatchKey, Job, Lane, Limits, TimeLimits
from batchery_worker.task_call import TaskCall


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
        self._small_batch_threshold = settings.small_batch_threshold or math.inf
        self._limits: dict[str, Limits] = {}
        #: Class by priority.
        self._classes = [settings.find_class(priority) for priority in range(LOWEST_PRIORITY + 1)]

    def limits(self, task: BatchTask) -> Limits:
        """The limits of a task: its own, or those of the settings."""
        if task.name not in self._limits:
            wait_ms, target_ms = task.max_wait_ms, task.target_latency_ms
            target_ms = target_ms or self._settings.target_latency_ms
            self._limits[task.name] = Limits(
                max_batch_size=task.max_batch_size or self._settings.max_batch_size,
                max_wait_s=(self._settings.max_wait_ms if wait_ms is None else wait_ms) / 1e3,
                target_s=target_ms and target_ms / 1e3,
            )
        return self._limits[task.name]

    def max_batch_tokens(self, task: BatchTask) -> int | None:
        """The token budget of a task; None lets the device choose."""
        return task.max_batch_tokens or self._settings.max_batch_tokens

    def cache(self, task: BatchTask) -> CachePolicy | None:
        """How results of a task are cached; None if they are not."""
        if task.cache is None:
            return None
        return CachePolicy(
            version=task.cache,
            ttl_s=task.cache_ttl_s or self._settings.cache_ttl_s,
            max_bytes=task.cache_max_bytes or self._settings.cache_max_bytes,
        )

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
            BatchArgumentError: There is not exactly one positional argument, or the keywords
                cannot be written as JSON.
            InvalidItem: A header of ours is malformed, or does not fit the argument; or the job
                cannot be pickled.
        """
        message = call.message
        argument = only_item(task.name, message.get("args") or ())
        header = message.get(HEADER)
        call.items, call.is_multi_item = multi_item.read_items(argument, header)
        keywords = message.get("kwargs")
        if reason := why_unportable([*call.items, keywords] if keywords else call.items):
            raise InvalidItem(
                f"the job cannot be handed to a device: {reason};"
                " send plain data, not nested by the hundreds"
            )
        if needs_context(task):
            call.context = _context(message, call.request and call.request.embed)
        return Job(
            id=call.task_id,
            key=BatchKey(task.name, _encode(keywords), time_limits),
            limits=self.limits(task),
            items=len(call.items),
            arrived_s=now_s,
            payload=call,
            lane=self._lane(message, task, len(call.items)),
            deadline_s=now_s + read_deadline(message) - self._clock(),
        )

    def _lane(self, message: Mapping[str, Any], task: BatchTask, items: int) -> Lane:
        delivery: Any = message.get("delivery_info") or {}
        priority = delivery.get("priority") or 0
        if type(priority) is not int:
            priority = 0
        return Lane(
            self._classes[max(0, min(priority, LOWEST_PRIORITY))],
            read_tenant(message),
            is_large=items > (task.small_batch_threshold or self._small_batch_threshold),
        )


def needs_context(task: BatchTask) -> bool:
    """Whether a device needs the headers of a task's jobs: for `self.request`, or for STARTED."""
    return task.sees_request or bool(task.track_started)


def _context(message: Mapping[str, Any], embed: Mapping[str, Any] | None) -> bytes:
    try:
        # What follows in a chain, and callbacks: most jobs have none.
        follows = embed and any(embed.values())
        return dump_context({**embed, **message} if embed and follows else message)
    except Exception as error:  # noqa: BLE001 - the objects' own code may raise anything
        raise InvalidItem(f"the headers cannot be handed to a device: {error}") from None


def _encode(keywords: Mapping[str, Any] | None) -> str:
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
