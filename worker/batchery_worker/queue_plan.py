"""How jobs come to a worker's devices: from which queues, or handed over by Celery's consumer."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
from celery.worker import components
from kombu import Exchange, Queue

from batchery.errors import SettingsError
from batchery.installation import get_redis_url
from batchery.model_task import ModelTask
from batchery.redis_scripts import get_database
from batchery.settings import Settings
from batchery.shards import Shard, list_shards
from batchery.task import BatchTask
from batchery.transport import NEEDS_WRITES
from batchery.transport.redis_schema import BATCHES, ORDINARY
from batchery_worker.brokers import open_channel
from batchery_worker.device_pool.startup import choose_devices, find_places
from batchery_worker.ipc.messages import JobsSetup


@dataclass(slots=True)
class QueuePlan:
    """What a worker's devices do."""

    app: Any
    tasks: Sequence[BatchTask]
    #: Device -> the models that it serves -> why they are there.
    places: Mapping[str, Mapping[str, str]]
    #: Whether the worker has ordinary tasks, or a beat, which need not wait for models.
    has_other_work: bool
    #: What all devices must know of jobs; `is_handed` says that Celery's consumer has all queues,
    #: and hands the jobs over.
    jobs: JobsSetup
    #: Whether devices are threads of this process.
    in_process: bool = False
    #: Whether devices lease from another Redis than Celery's broker, where no ordinary jobs are.
    is_apart: bool = False
    #: Tasks that not every device serves; their jobs have a list of their own beside all queues.
    placed: frozenset[str] = frozenset()
    #: By the queue that tasks are routed to: maximum batch size of each batch task; and the queues
    #: of ordinary tasks.
    batch: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    ordinary: frozenset[str] = frozenset()
    #: Maximum batch size of each task that is not placed, and of those that may come by any queue.
    all_sizes: Mapping[str, int] = field(default_factory=dict)
    anywhere: Mapping[str, int] = field(default_factory=dict)
    #: Queue that devices take from -> task -> maximum batch size.
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def take_queues(self) -> None:
        """Takes the queues of batch tasks from Celery's consumer, which gets those beside them."""
        if self.is_apart:
            return
        queues = self.app.amqp.queues
        for name in self.sizes:
            if not name.endswith(BATCHES):
                queues.deselect(name)
                beside = name + ORDINARY
                queues.select_add(Queue(beside, Exchange(beside), beside))

    def add(self, queue: str) -> bool:
        """Has devices take from one more queue; returns whether Celery's consumer must, too."""
        sizes = self.sizes_of(queue)
        self.sizes = {**self.sizes, **sizes}
        return self.is_apart or queue not in sizes

    def remove(self, queue: str) -> bool:
        """Has devices take no longer from a queue; returns whether Celery's consumer has it."""
        gone = {queue, queue + BATCHES}
        is_ours = queue in self.sizes
        self.sizes = {name: each for name, each in self.sizes.items() if name not in gone}
        return self.is_apart or not is_ours

    def sizes_of(self, queue: str) -> dict[str, Mapping[str, int]]:
        """The list from which devices take the jobs of a queue, and the tasks whose jobs come."""
        is_known = queue in self.batch or queue in self.ordinary
        if self.is_apart:
            return {queue: {**self.all_sizes, **self.batch.get(queue, {})}}
        batch = self.batch.get(queue, {}) if is_known else self.anywhere
        placed = self.placed & batch.keys()
        # A device would take jobs that it cannot run.
        is_mixed = queue in self.ordinary or 0 < len(placed) < len(batch)
        if batch and not is_mixed:
            return {queue: batch if placed else {**self.anywhere, **batch}}
        return {queue + BATCHES: self.all_sizes}


def is_in_test(worker: Any) -> bool:
    """Whether Celery's `start_worker` has made it, on a thread of a test's process.

    A process would not have what the test has changed: it would use other databases, for example.
    """
    testing = sys.modules.get("celery.contrib.testing.worker")
    return testing is not None and isinstance(worker, testing.TestWorkController)


def may_lease(worker: Any) -> bool:
    """Whether a worker's devices lease their jobs: from a Redis, and not within a test."""
    if is_in_test(worker):
        return False
    return is_apart(worker.app) or has_redis_broker(worker.app)


def is_apart(app: Any) -> bool:
    """Whether the jobs of batch tasks are not with the app's broker."""
    return list_shards(app)[0].is_apart


def has_redis_broker(app: Any) -> bool:
    """Whether the app's broker is a Redis."""
    return bool(app.connection_for_read().transport.driver_type == "redis")


def plan_queues(
    worker: Any, all_tasks: Sequence[BatchTask], tasks: Sequence[BatchTask], settings: Settings
) -> QueuePlan:
    """Chooses devices, and how jobs come to them.

    Args:
        worker: Celery's `WorkController`.
        all_tasks: The app's.
        tasks: Those whose jobs come to this worker's queues.
        settings: Of the worker.
    """
    app, steps = worker.app, worker.blueprint.order
    has_beat = any(isinstance(each, components.Beat) and each.enabled for each in steps)
    has_ordinary = not all(isinstance(each, BatchTask) for each in list_own_tasks(app))
    jobs = JobsSetup(
        hostname=worker.hostname,
        sends_events=bool(worker.task_events),
        limits=(worker.soft_time_limit, worker.time_limit),
        is_handed=not may_lease(worker),
    )
    if jobs.is_handed and is_apart(app):
        raise SettingsError(
            f"redis_url = {get_redis_url(app)!r:.60}: a worker within a test has its jobs from its"
            " app's broker; unset redis_url for the test, or start a worker of its own"
        )
    models = [task for task in tasks if isinstance(task, ModelTask)]
    places = find_places(models, choose_devices(settings.devices))
    plan = QueuePlan(app, tasks, places, has_beat or has_ordinary, jobs)
    if jobs.is_handed:
        plan.in_process = is_in_test(worker)
        for task in all_tasks:
            type(task).Strategy = "batchery_worker.handing:hand_over"
    else:
        plan.is_apart = is_apart(app)
        if plan.is_apart and has_redis_broker(app):
            _refuse_same_redis(app)
        _plan_leases(plan, settings)
        for task in all_tasks:
            how = "forward_to_own" if task.name in plan.placed else "forward_to_devices"
            type(
                task
            ).Strategy = f"batchery_worker.forwarding:{'publish' if plan.is_apart else how}"
        if has_redis_broker(app):
            options = app.conf.broker_transport_options
            app.conf.broker_transport_options = {**options, NEEDS_WRITES: True}
    return plan


def _plan_leases(plan: QueuePlan, settings: Settings) -> None:
    """Chooses the queues from which devices lease jobs."""
    app, batch = plan.app, defaultdict[str, dict[str, int]](dict)
    for task in list_own_tasks(app):
        queue = find_queue(task) or str(app.conf.task_default_queue)
        if isinstance(task, BatchTask):
            batch[queue][task.name] = task.max_batch_size or settings.max_batch_size
        else:
            plan.ordinary |= {queue}
    plan.batch = dict(batch)
    sizes = {task.name: task.max_batch_size or settings.max_batch_size for task in plan.tasks}
    plan.placed = frozenset(
        task.name for task in plan.tasks if task.has_own_process or is_placed(task, plan.places)
    )
    plan.all_sizes = {name: size for name, size in sizes.items() if name not in plan.placed}
    # A task without a route may come by any queue that no ordinary task has.
    plan.anywhere = {
        name: size for name, size in plan.all_sizes.items() if comes_by_any(app.tasks[name])
    }
    if plan.is_apart:
        _refuse_mixed(plan)
    plan.sizes = {name + BATCHES: {name: sizes[name]} for name in sorted(plan.placed)}
    for name in app.amqp.queues.consume_from:
        plan.add(str(name))


def _refuse_same_redis(app: Any) -> None:
    """Refuses a Redis that is the broker by another name: jobs would go round in circles.

    Raises:
        SettingsError: It is.
    """
    seen = []
    for place in (Shard(), list_shards(app)[0]):
        try:
            with open_channel(app, place) as channel:
                run_id = channel.client.info("server")["run_id"]
                seen.append((run_id, get_database(channel.pool)))
        except (redis.RedisError, OSError):
            # One that is away is waited for, and another one answers later.
            return
    if seen[0] == seen[1]:
        raise SettingsError(
            f"redis_url = {get_redis_url(app)!r:.60} is the app's broker by another name; unset it,"
            " or write it as the URL of the broker is written"
        )


def _refuse_mixed(plan: QueuePlan) -> None:
    """Refuses queues of which a device would take jobs that another one must run.

    Raises:
        SettingsError: There is one.
    """
    for queue, sizes in plan.batch.items():
        placed = sorted(plan.placed & sizes.keys())
        if 0 < len(placed) < len(sizes):
            raise SettingsError(
                f"queue {queue!r}: not every device serves {', '.join(placed)}, and other batch"
                " tasks come by the same queue, which redis_url does not allow; give these tasks"
                " queues of their own"
            )


def is_placed(task: BatchTask, places: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a task is a model that not every device serves."""
    return isinstance(task, ModelTask) and any(task.name not in here for here in places.values())


def list_own_tasks(app: Any) -> list[Any]:
    """The app's tasks, without those of Celery itself."""
    return [task for name, task in app.tasks.items() if not name.startswith("celery.")]


def find_queue(task: Any) -> str | None:
    """The queue of a task's own options, or of its route; None if it has none that can be told."""
    queue = task._get_exec_options()["queue"]
    if queue is None:
        try:
            route = task.app.amqp.router.lookup_route(task.name, (), {}, {}, type(task))
        except Exception:  # noqa: BLE001 - it is the app's own code
            return None
        queue = (route or {}).get("queue")
    return None if queue is None else str(getattr(queue, "name", queue))


def comes_by_any(task: Any) -> bool:
    """Whether a task has no route: its jobs may come by any queue that a caller names.

    A router may look at a job's arguments: then nobody knows before the job is there.
    """
    own = task.own_queue if isinstance(task, BatchTask) else None
    return find_queue(task) in (None, own)
