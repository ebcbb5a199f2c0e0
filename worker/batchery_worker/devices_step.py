"""The worker's one part in batch jobs: it starts devices, which take their jobs from Redis.

Everything else of the worker is Celery's own. Queues by which only batch jobs come are given to the
devices, and are not consumed by Celery. With other brokers, and in tests, Celery's consumer hands
over the batch jobs that it gets. Commands of remote control reach the devices, and their answers
are put together with those of the worker.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from celery import bootsteps, signals
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu import Exchange, Queue
from kombu.utils.imports import symbol_by_name

from batchery.errors import StartError
from batchery.installation import get_installation
from batchery.transport import REFUSALS
from batchery.transport.redis_schema import find_own
from batchery_worker.commit.eligibility import warn_of_tracer
from batchery_worker.device_pool.beats import HolderBeats
from batchery_worker.device_pool.fleet import Fleet
from batchery_worker.device_pool.process import DeviceProcess, StartProcess, start_process
from batchery_worker.device_pool.reload import Reloads
from batchery_worker.device_pool.startup import device_setups, task_modules
from batchery_worker.handing import HandedJobs
from batchery_worker.ipc.messages import Setup
from batchery_worker.queue_plan import QueuePlan

_Step: Any = bootsteps.StartStopStep

logger = logging.getLogger("batchery.worker")

#: A device on a thread; an import path, because the code of devices imports torch.
DEVICE_THREAD = "batchery_worker.device.thread:DeviceThread"

#: What the process of a card with feeders runs.
CARD_PROCESS = "batchery_worker.feeders.card_process"

#: Commands whose answers are lists of jobs; those of devices are added.
LISTS = ("active", "reserved", "scheduled")

#: Commands that change something in each device.
CHANGES = (
    *("revoke", "revoke_by_stamped_headers", "terminate", "rate_limit", "time_limit"),
    *("enable_events", "disable_events"),
)


@contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Ends the worker with a line of its log where it cannot start.

    Raises:
        SystemExit: With the exit code of the error.
    """
    try:
        yield
    except StartError as error:
        logger.debug("start failed", exc_info=True)
        logger.critical("%s", error)
        raise SystemExit(error.exit_code) from None


class DevicesStep(_Step):  # type: ignore[misc]
    """Starts devices, and ends them."""

    # Probes are answered while models are loaded.
    requires = (
        "batchery_worker.bootstep:BatchStep",
        "batchery_worker.operations.watch:WatchStep",
    )

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        parent.fleet = parent.reloads = None

    def include_if(self, parent: Any) -> bool:
        """Whether the worker has devices."""
        return getattr(parent, "queue_plan", None) is not None

    def create(self, parent: Any) -> None:
        """Called by Celery with its `WorkController`."""
        app, plan = parent.app, parent.queue_plan
        settings = get_installation(app).settings
        with failing_in_one_line():
            setups = device_setups(
                *(app, plan.tasks, settings, plan.places),
                in_process=plan.in_process,
                jobs=plan.jobs,
            )
        start: StartProcess = start_process
        if plan.in_process:
            start = partial(symbol_by_name(DEVICE_THREAD), app)
        devices = make_devices([each.with_queues(plan.sizes) for each in setups], start)
        make_holding: Any = HandedJobs if plan.jobs.is_handed else partial(HolderBeats, app)
        self.fleet = parent.fleet = Fleet(settings, devices, make_holding, _on_lost)
        parent.reloads = Reloads(self.fleet)
        self._has_other_work = plan.has_other_work
        if not plan.in_process:
            # Threads have their jobs where Celery's own commands look.
            extend_commands(self.fleet, plan)
        signals.worker_shutting_down.connect(self._on_shutting_down)

    def _on_shutting_down(self, **_: Any) -> None:
        # Celery stops its consumer first, which may take seconds.
        self.fleet.stop_taking()

    def start(self, parent: Any) -> None:
        """Starts the devices; waits for models where there is nothing else to do."""
        # After the banner, which names all queues.
        parent.queue_plan.take_queues()
        warn_of_tracer(parent.app, parent.queue_plan.tasks)
        try:
            with failing_in_one_line():
                self.fleet.start(worker_state.maybe_shutdown, waits=not self._has_other_work)
        except BaseException:
            self.fleet.terminate()
            raise

    def stop(self, parent: Any) -> None:  # noqa: ARG002 - as Celery calls it
        """Finishes what the devices have begun."""
        self.fleet.stop(is_cold_shutdown)

    def terminate(self, parent: Any) -> None:  # noqa: ARG002 - as Celery calls it
        """Kills the devices; what they hold goes back."""
        self.fleet.terminate()

    def info(self, parent: Any) -> Mapping[str, Any]:
        """What `inspect stats` shows of devices."""
        pool = getattr(parent.pool, "info", None) or {}
        figures = self.fleet.figures()
        total = Counter(worker_state.total_count) + Counter(figures.pop("total"))
        return {"pool": {**pool, **figures}, "total": total}


def make_devices(setups: Sequence[Setup], start: StartProcess) -> list[DeviceProcess]:
    """The devices of these setups; a card comes before its feeders, which are told where it is."""
    devices: list[DeviceProcess] = []
    card, address = None, b""
    for setup in setups:
        if setup.computes is not None:
            listening = socket.socket(socket.AF_UNIX)
            # Of a name that is free, and no file's.
            listening.bind("")
            listening.listen()
            address = listening.getsockname()
            begin = partial(start_process, module=CARD_PROCESS, listening=listening)
            devices.append(card := DeviceProcess(setup, begin))
        elif setup.feeder:
            devices.append(DeviceProcess(replace(setup, address=address), start, card=card))
        else:
            devices.append(DeviceProcess(setup, start))
    return devices


class RefusalsStep(_Step):  # type: ignore[misc]
    """Part of Celery's consumer: what a Redis refuses that cannot write is a lost connection.

    A primary may become a replica at any moment, or be full. Else the refusal of an acknowledgement
    would end the worker, and its devices with it.
    """

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        if getattr(consumer.controller, "queue_plan", None) is not None:
            consumer.connection_errors = (*consumer.connection_errors, *REFUSALS)


def is_cold_shutdown() -> bool:
    """Whether the worker was told to end without waiting for anything."""
    # Celery keeps an exit code here, and 0 is a valid one.
    exit_code: Any = worker_state.should_terminate
    return exit_code is not None and exit_code is not False


def _on_lost(why: str) -> None:
    logger.critical("%s: the worker stops, its jobs go back to the queue", why)
    setattr(worker_state, "should_stop", StartError.exit_code)  # noqa: B010 - typed as None


def extend_commands(fleet: Fleet, plan: QueuePlan) -> None:
    """Lets commands of remote control reach the devices of this process's worker."""
    for name in LISTS:
        _extend(name, partial(_listed, fleet, name))
    for name in CHANGES:
        _extend(name, partial(_changed, fleet, name))
    _extend("query_task", partial(_queried, fleet))
    _extend("pool_restart", partial(_restart, fleet, plan))
    if not plan.jobs.is_handed:
        _extend("active_queues", partial(_with_queues, fleet))
        _extend("add_consumer", partial(_add_consumer, fleet, plan))
        _extend("cancel_consumer", partial(_cancel_consumer, fleet, plan))


def _extend(name: str, function: Callable[..., Any]) -> None:
    stock = getattr(Panel.data[name], "batchery_stock", Panel.data[name])
    extended: Any = partial(function, stock)
    extended.batchery_stock = stock
    Panel.data[name] = extended


def _listed(fleet: Fleet, name: str, stock: Any, state: Any, **options: Any) -> Any:
    answer = [each for each in stock(state, **options) or () if each is not None]
    for found in fleet.ask(name, options).values():
        if isinstance(found, list):
            # Several devices know the same jobs that wait for their time.
            answer += [each for each in found if each not in answer]
    return answer


def _changed(fleet: Fleet, name: str, stock: Any, state: Any, *args: Any, **options: Any) -> Any:
    answer = stock(state, *args, **options)
    if args:
        options = {**options, **dict(zip(("task_id",), args, strict=False))}
    for found in fleet.change(name, options).values():
        ours = isinstance(found, dict) and found.get("ok")
        if ours and "unknown" in str(answer):
            answer = found
    return answer


def _add_consumer(
    fleet: Fleet, plan: QueuePlan, stock: Any, state: Any, queue: str, *args: Any, **options: Any
) -> Any:
    is_known = queue in plan.sizes
    is_celerys = plan.add(queue)
    if not is_known:
        fleet.take_from(plan.sizes)
    if is_celerys:
        return stock(state, queue, *args, **options)
    return {"ok": f"{'already consuming from' if is_known else 'add consumer'} {queue}"}


def _cancel_consumer(
    fleet: Fleet, plan: QueuePlan, stock: Any, state: Any, queue: str, **options: Any
) -> Any:
    is_celerys = plan.remove(queue)
    fleet.take_from(plan.sizes)
    if is_celerys:
        return stock(state, queue, **options)
    return {"ok": f"no longer consuming from {queue}"}


def _restart(fleet: Fleet, plan: QueuePlan, stock: Any, state: Any, **options: Any) -> Any:
    answer = stock(state, **options)
    fleet.recycle(task_modules(plan.tasks))
    return answer


def _with_queues(fleet: Fleet, stock: Any, state: Any, **options: Any) -> Any:
    names = [Queue(name, exchange=Exchange(name), routing_key=name) for name in fleet.queues]
    answer = [dict(each.as_dict(recurse=True)) for each in names]
    # Nobody needs to know of the lists beside queues.
    return answer + [
        each
        for each in stock(state, **options)
        if find_own(each["name"]) == each["name"] and each["name"] not in fleet.queues
    ]


def _queried(fleet: Fleet, stock: Any, state: Any, ids: Any, **options: Any) -> Any:
    answer = dict(stock(state, ids, **options) or {})
    for found in fleet.ask("query_task", {"ids": ids, **options}).values():
        answer.update(found if isinstance(found, dict) else {})
    return answer
