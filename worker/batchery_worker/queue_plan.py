"""How jobs come to a worker's devices: from which queues, or handed over by Celery's consumer."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery.worker import components
from kombu import Exchange, Queue

from batchery.model_task import ModelTask
from batchery.settings import Settings
from batchery.task import BatchTask
from batchery.transport import NEEDS_WRITES
from batchery.transport.redis_schema import BATCHES, ORDINARY
from batchery_worker.batching.batch_times import AHEAD_BATCHES
from batchery_worker.device_pool.startup import choose_devices, find_places
from batchery_worker.ipc.messages import JobsSetup


class QueueKinds(NamedTuple):
    """Which jobs come by a queue."""

    #: Maximum batch size of each batch task, by its name.
    batch: Mapping[str, int]
    ordinary: bool


@dataclass(slots=True)
class QueuePlan:
    """What a worker's devices do."""

    app: Any
    tasks: Sequence[BatchTask]
    #: Device -> the models that it serves -> why they are there.
    places: Mapping[str, Mapping[str, str]]
    #: Whether the worker has ordinary tasks, or a beat, which need not wait for models.
    has_other_work: bool
    hostname: str
    sends_events: bool
    limits: tuple[float | None, float | None]
    #: Tasks that not every device serves; their jobs have a list of their own beside all queues.
    placed: frozenset[str] = frozenset()
    levels: Sequence[int] = ()
    kinds: Mapping[str, Any] = field(default_factory=dict)
    #: Maximum batch size of each task that is not placed, and of those that may come by any queue.
    all_sizes: Mapping[str, int] = field(default_factory=dict)
    anywhere: Mapping[str, int] = field(default_factory=dict)
    #: Whether Celery's consumer has all queues, and hands the jobs over.
    is_handed: bool = False
    #: Whether devices are threads of this process.
    in_process: bool = False
    #: Queue -> task -> maximum batch size.
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def setup(self, served: Sequence[str], is_shared: bool) -> JobsSetup:
        """What a device must know that serves some tasks.

        Args:
            served: Names of the tasks.
            is_shared: Whether it also serves tasks that are not named.
        """
        return JobsSetup(
            queues=(),
            sizes={},
            levels=self.levels,
            hostname=self.hostname,
            sends_events=self.sends_events,
            limits=self.limits,
            own=frozenset(served),
            is_shared=is_shared,
            placed=self.placed,
            is_handed=self.is_handed,
        ).with_queues(self.sizes)

    def take_queues(self) -> None:
        """Takes the queues of batch tasks from Celery's consumer, which gets those beside them."""
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
        return queue not in sizes

    def remove(self, queue: str) -> bool:
        """Has devices take no longer from a queue; returns whether Celery's consumer has it."""
        gone = {queue, queue + BATCHES}
        is_ours = queue in self.sizes
        self.sizes = {name: each for name, each in self.sizes.items() if name not in gone}
        return not is_ours

    def sizes_of(self, queue: str) -> dict[str, Mapping[str, int]]:
        """The list from which devices take the jobs of a queue, and the tasks whose jobs come."""
        kind = self.kinds.get(queue)
        batch = dict(self.anywhere if kind is None else kind.batch)
        placed = self.placed & batch.keys()
        # A device would take jobs that it cannot run.
        is_mixed = (kind is not None and kind.ordinary) or 0 < len(placed) < len(batch)
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
    is_redis = worker.app.connection_for_read().transport.driver_type == "redis"
    return bool(is_redis and not is_in_test(worker))


def plan_handing(
    worker: Any, all_tasks: Sequence[BatchTask], tasks: Sequence[BatchTask], settings: Settings
) -> QueuePlan:
    """Has Celery's consumer hand its batch jobs over."""
    for task in all_tasks:
        type(task).Strategy = "batchery_worker.handing:hand_over"
    places = _choose_places(tasks, settings)
    return _make_plan(worker, tasks, places, is_handed=True, in_process=is_in_test(worker))


def _choose_places(
    tasks: Sequence[BatchTask], settings: Settings
) -> Mapping[str, Mapping[str, str]]:
    """The devices, and which models each of them serves."""
    models = [task for task in tasks if isinstance(task, ModelTask)]
    return find_places(models, choose_devices(settings.devices))


def _make_plan(
    worker: Any,
    tasks: Sequence[BatchTask],
    places: Mapping[str, Mapping[str, str]],
    **fields: Any,
) -> QueuePlan:
    steps = worker.blueprint.order
    has_beat = any(isinstance(each, components.Beat) and each.enabled for each in steps)
    has_ordinary = not all(isinstance(each, BatchTask) for each in list_own_tasks(worker.app))
    return QueuePlan(
        app=worker.app,
        tasks=tasks,
        places=places,
        has_other_work=has_beat or has_ordinary,
        hostname=worker.hostname,
        sends_events=bool(worker.task_events),
        limits=(worker.soft_time_limit, worker.time_limit),
        **fields,
    )


def plan_leasing(
    worker: Any,
    all_tasks: Sequence[BatchTask],
    tasks: Sequence[BatchTask],
    settings: Settings,
) -> QueuePlan:
    """Chooses the queues, and takes them from Celery's consumer."""
    app = worker.app
    kinds = kinds_by_queue(app, settings.max_batch_size)
    consumed = [str(name) for name in app.amqp.queues.consume_from]
    sizes = {task.name: task.max_batch_size or settings.max_batch_size for task in tasks}
    places = _choose_places(tasks, settings)
    placed = frozenset(task.name for task in tasks if task.slots or is_placed(task, places))
    all_sizes = {name: size for name, size in sizes.items() if name not in placed}
    # A task without a route may come by any queue that no ordinary task has.
    anywhere = {name: size for name, size in all_sizes.items() if comes_by_any(app.tasks[name])}
    for task in all_tasks:
        how = "forward_to_own" if task.name in placed else "forward_to_devices"
        type(task).Strategy = f"batchery_worker.forwarding:{how}"
    options = app.conf.broker_transport_options
    app.conf.broker_transport_options = {**options, NEEDS_WRITES: True}
    plan = _make_plan(
        *(worker, tasks, places),
        placed=placed,
        levels=sorted(each.level for each in settings.classes.values()),
        kinds=kinds,
        all_sizes=all_sizes,
        anywhere=anywhere,
        sizes={name + BATCHES: {name: sizes[name]} for name in sorted(placed)},
    )
    for name in consumed:
        plan.add(name)
    return plan


def is_placed(task: BatchTask, places: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether a task is a model that not every device serves."""
    return isinstance(task, ModelTask) and any(task.name not in here for here in places.values())


def list_own_tasks(app: Any) -> list[Any]:
    """The app's tasks, without those of Celery itself."""
    return [task for name, task in app.tasks.items() if not name.startswith("celery.")]


def kinds_by_queue(app: Any, max_batch_size: int) -> dict[str, QueueKinds]:
    """Which jobs come by each queue that a task is routed to.

    Args:
        app: The worker's app.
        max_batch_size: Of tasks that have none of their own.
    """
    kinds: dict[str, QueueKinds] = {}
    for task in list_own_tasks(app):
        queue = find_queue(task) or str(app.conf.task_default_queue)
        known = kinds.get(queue, QueueKinds({}, ordinary=False))
        kinds[queue] = (
            QueueKinds(
                {**known.batch, task.name: task.max_batch_size or max_batch_size},
                known.ordinary,
            )
            if isinstance(task, BatchTask)
            else QueueKinds(known.batch, ordinary=True)
        )
    return kinds


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


def prefetch_jobs(tasks: list[BatchTask], settings: Settings, devices: int) -> int:
    """How many unfinished jobs of one class the worker must hold for full batches.

    Every task may have its waiting batches on every device, whichever queue they come from. What
    runs in slots has no waiting ones.
    """
    batches = devices * (1 + AHEAD_BATCHES)
    return sum(
        task.slots * devices
        if task.slots
        else (task.max_batch_size or settings.max_batch_size) * batches
        for task in tasks
    )
