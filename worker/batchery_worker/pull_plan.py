"""Which queues of a worker its devices take from, and what they must know of them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery.worker import state as worker_state
from kombu import Exchange, Queue

from batchery.settings import Settings
from batchery.task import BatchTask
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.forwarding import BATCHES, ORDINARY
from batchery_worker.ipc.messages import PullSetup


@dataclass(frozen=True, slots=True)
class PullPlan:
    """What a worker's devices do."""

    app: Any
    tasks: Sequence[BatchTask]
    devices: Sequence[str]
    has_other_work: bool
    hostname: str
    sends_events: bool
    limits: tuple[float | None, float | None]
    options: Mapping[str, Any]
    #: Queue -> task -> maximum batch size.
    sizes: Mapping[str, Mapping[str, int]]

    def setup(self, served: Sequence[str], is_shared: bool) -> PullSetup:
        """What a device must know that serves some tasks.

        Args:
            served: Names of the tasks.
            is_shared: Whether it also serves tasks that are not named.
        """
        slotted = {task.name for task in self.tasks if task.slots}
        own = set(served)
        sizes = {
            queue: {
                name: size
                for name, size in each.items()
                if name in own or (is_shared and name not in slotted)
            }
            for queue, each in self.sizes.items()
        }
        sizes = {queue: each for queue, each in sizes.items() if each}
        return PullSetup(
            queues=tuple(sizes),
            sizes=sizes,
            options=self.options,
            hostname=self.hostname,
            sends_events=self.sends_events,
            limits=self.limits,
            revoked=tuple(worker_state.revoked),
        )


def pulls(worker: Any) -> bool:
    """Whether a worker's devices pull: its broker is a Redis, and it is not within a test."""
    if os.environ.get("PULL_TRIAL") != "1":
        return False
    testing = sys.modules.get("celery.contrib.testing.worker")
    if testing is not None and isinstance(worker, testing.TestWorkController):
        return False
    return bool(worker.app.connection_for_read().transport.driver_type == "redis")


def plan_pull(
    worker: Any,
    all_tasks: Sequence[BatchTask],
    tasks: Sequence[BatchTask],
    settings: Settings,
    *,
    has_other_work: bool,
) -> PullPlan:
    """Chooses the queues, and takes them from Celery's consumer."""
    from batchery_worker.bootstep import find_queue, kinds_by_queue, prefetch_jobs

    app = worker.app
    kinds = kinds_by_queue(app, settings.max_batch_size)
    consumed = [str(name) for name in app.amqp.queues.consume_from]
    all_sizes = {task.name: task.max_batch_size or settings.max_batch_size for task in tasks}
    # A task without a route may come by any queue that no ordinary task has.
    anywhere = {task.name: all_sizes[task.name] for task in tasks if find_queue(task) is None}
    sizes: dict[str, dict[str, int]] = {}
    for name in consumed:
        kind = kinds.get(name)
        batch = dict(anywhere if kind is None else kind.batch)
        if batch and not (kind is not None and kind.ordinary):
            sizes[name] = {**anywhere, **batch}
            app.amqp.queues.deselect(name)
            app.amqp.queues.select_add(
                Queue(name + ORDINARY, Exchange(name + ORDINARY), name + ORDINARY)
            )
        else:
            sizes[name + BATCHES] = all_sizes
    for task in all_tasks:
        type(task).Strategy = "batchery_worker.forwarding:forward_to_devices"
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {**options, "leases": False}
    named = ("fetch_messages", "queue_prefetch")
    return PullPlan(
        app=app,
        tasks=tasks,
        devices=choose_devices(settings.devices),
        has_other_work=has_other_work,
        hostname=worker.hostname,
        sends_events=bool(worker.task_events),
        limits=(worker.soft_time_limit, worker.time_limit),
        options={
            "fetch_messages": max(prefetch_jobs([task], settings, 1) for task in tasks),
            **{name: options[name] for name in named if name in options},
            "class_levels": sorted(each.level for each in settings.classes.values()),
        },
        sizes=sizes,
    )
