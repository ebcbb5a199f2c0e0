"""How much a worker prefetches, which queues it consumes, and when it refuses to start."""

import gc
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import click
import pytest
from celery import Celery
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import TaskRevokedError
from celery.worker import WorkController
from celery.worker.request import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Queue
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.common import QoS

from batchery import BatchTask, Model, Settings, SettingsError, install, register
from batchery.queue_limits import find_destination
from batchery_worker import bootstep
from batchery_worker.bootstep import (
    BatchStep,
    check_is_accepted,
    find_queue,
    is_served,
    kinds_by_queue,
    prefetch_jobs,
    warn_of_unread_results,
    warn_of_unused_queues,
)
from batchery_worker.completion.ordinary import OrdinaryThreads
from batchery_worker.late_binding import QueueKinds
from batchery_worker.pool import HybridPool
from batchery_worker.request import BatchRequest

#: For tests of tasks that have a queue of their own.
OWN_QUEUES = pytest.mark.filterwarnings("ignore:[^']*'queue' task attribute is deprecated")


class Worker:
    """As much of Celery's `WorkController` as the step reads."""

    autoscale: tuple[int, int] | None = None
    max_concurrency: int | None = None
    steps: tuple[Any, ...] = ()
    pool_putlocks = True
    #: None where no event loop runs.
    semaphore: Any = None
    consumer: Any = None

    def __init__(
        self,
        app: Celery,
        *,
        pool: type = OrdinaryThreads,
        concurrency: int = 2,
        multiplier: int = 4,
    ) -> None:
        self.app = app
        self.pool: Any = pool(concurrency, app=app)
        self.concurrency = self.min_concurrency = concurrency
        self.prefetch_multiplier = multiplier
        #: Names of the tasks whose jobs went to the pool, and of those that waited for a process.
        self.processed: list[str] = []
        self.waited: list[str] = []
        self.process_task = self._process_task_sem

    def _process_task(self, request: Any) -> None:
        request.execute_using_pool(self.pool)
        self.processed.append(request.name)

    def _process_task_sem(self, request: Any) -> None:
        self.waited.append(request.name)


def make_app(**settings: Any) -> Celery:
    app = Celery("stepped", broker="memory://", set_as_current=False)
    return install(app, **settings)


def add_task(app: Celery, name: str = "work", **options: Any) -> BatchTask:
    task: BatchTask = app.register_task(
        type("Work", (BatchTask,), {"name": name, "run": lambda _, items: items, **options})()
    )
    return task


def prepare(worker: Worker) -> None:
    BatchStep(worker).create(worker)


def test_every_task_has_room_for_its_running_and_its_waiting_batches() -> None:
    app = make_app()
    tasks = [add_task(app, "one", max_batch_size=10), add_task(app, "two")]
    settings = Settings(max_batch_size=64, prefetch_batches=2)
    assert prefetch_jobs(tasks, settings, devices=1) == 10 * 3 + 64 * 3
    assert prefetch_jobs(tasks, settings, devices=8) == 8 * (10 * 3 + 64 * 3)
    assert prefetch_jobs([], settings, devices=1) == 0


@settings(max_examples=25)
@given(
    concurrency=st.integers(1, 40),
    multiplier=st.integers(0, 10),
    size=st.integers(1, 500),
    batches=st.integers(1, 5),
)
def test_the_prefetch_is_widened_as_far_as_needed_and_never_narrowed(
    concurrency: int, multiplier: int, size: int, batches: int
) -> None:
    app = make_app(max_batch_size=size, prefetch_batches=batches)
    add_task(app)
    worker = Worker(app, concurrency=concurrency, multiplier=multiplier)
    prepare(worker)
    needed = size * (1 + batches)
    if multiplier == 0:
        assert worker.prefetch_multiplier == 0
    else:
        needed_for_a_class = max(multiplier, math.ceil(needed / concurrency))
        assert worker.prefetch_multiplier == 3 * needed_for_a_class


def test_each_models_queue_has_its_part_of_the_prefetch() -> None:
    app = make_app(max_batch_size=10, prefetch_batches=1)
    app.conf.broker_transport_options = {"queue_prefetch": {"gpu": 7}, "lease_expiry_s": 2}
    register(app, "embed", Model)
    register(app, "rerank", Model, queue="embed", max_batch_size=5)
    register(app, "classify", Model, queue="gpu")
    prepare(Worker(app))
    assert app.conf.broker_transport_options == {
        "fetch_messages": 20,
        "queue_prefetch": {"celery": 8, "embed": 30, "gpu": 7},
        "class_levels": [0, 3, 6],
        "ordinary_queues": ["celery"],
        "lease_expiry_s": 2,
    }


def test_a_worker_without_batch_tasks_is_left_alone() -> None:
    app = make_app(max_batch_size=500)
    worker = Worker(app)
    prepare(worker)
    assert worker.prefetch_multiplier == 4
    assert set(app.amqp.queues.consume_from) == set(app.amqp.queues)


def test_queues_without_batch_tasks_keep_the_prefetch_that_they_have_without_batchery() -> None:
    app = make_app()
    app.conf.task_queues = [Queue("celery"), Queue("embed")]
    register(app, "embed", Model)
    worker = Worker(app, concurrency=2, multiplier=4)
    prepare(worker)
    assert app.conf.broker_transport_options["queue_prefetch"]["celery"] == 8
    assert worker.prefetch_multiplier > 4


def test_where_processes_are_added_the_prefetch_is_that_of_all_of_them() -> None:
    app = make_app()
    register(app, "embed", Model)
    worker = Worker(app, concurrency=1, multiplier=1)
    worker.max_concurrency = 10
    prepare(worker)
    assert app.conf.broker_transport_options["queue_prefetch"]["celery"] == 10


def test_queues_of_ordinary_tasks_keep_their_prefetch_beside_a_batch_task_without_a_route() -> None:
    app = make_app()
    app.conf.task_queues = [Queue("celery"), Queue("mails"), Queue("any")]
    app.conf.task_routes = {"mail": {"queue": "mails"}}
    app.task(name="mail", shared=False)(make_app)
    add_task(app)
    prepare(Worker(app, concurrency=2, multiplier=4))
    assert app.conf.broker_transport_options["queue_prefetch"] == {"mails": 8}
    assert app.conf.broker_transport_options["ordinary_queues"] == ["mails"]


@pytest.mark.parametrize("limit", [None, 50])
def test_a_limit_of_jobs_with_an_eta_does_not_lower_the_prefetch(limit: int | None) -> None:
    app = make_app()
    app.conf.worker_eta_task_limit = limit
    add_task(app)
    worker = Worker(app, concurrency=2, multiplier=4)
    prepare(worker)
    prefetch = 2 * worker.prefetch_multiplier
    qos = QoS(Mock(), prefetch, max_prefetch=app.conf.worker_eta_task_limit)
    assert qos.increment_eventually() == prefetch + 1
    # As many more as without batch tasks, where it was 8.
    assert qos.increment_eventually(1000) == prefetch + (1001 if limit is None else 50 - 8)


def test_every_queue_may_bring_jobs_of_a_batch_task_without_a_route() -> None:
    app = make_app()
    add_task(app)
    prepare(Worker(app))
    assert app.conf.broker_transport_options["queue_prefetch"] == {}


@OWN_QUEUES
def test_kinds_of_jobs_are_known_by_queue() -> None:
    app = make_app()
    app.conf.task_routes = {"routed": {"queue": "gpu"}}
    app.task(name="ordinary", shared=False)(make_app)
    add_task(app, "routed", max_batch_size=8)
    add_task(app, "unrouted")
    # The own queue outranks a route, as when Celery sends a job.
    app.conf.task_routes["own"] = {"queue": "gpu"}
    own = add_task(app, "own", queue=Queue("own queue"))
    assert find_destination(app, own.name, {}).queue == find_queue(own) == "own queue"
    register(app, "embed", Model)
    assert kinds_by_queue(app, 64) == {
        "own queue": QueueKinds({"own": 64}, ordinary=False),
        "celery": QueueKinds({"unrouted": 64}, ordinary=True),
        "gpu": QueueKinds({"routed": 8}, ordinary=False),
        "embed": QueueKinds({"embed": 64}, ordinary=False),
    }


class GreenPool(SoloPool):
    is_green = True


def ordinary_pool(worker: Worker) -> Any:
    assert isinstance(worker.pool, HybridPool)
    return worker.pool._ordinary


@pytest.mark.parametrize("pool", [PreforkPool, SoloPool, OrdinaryThreads, GreenPool])
def test_ordinary_tasks_keep_the_pool_that_was_chosen(pool: type) -> None:
    app = make_app()
    add_task(app)
    app.task(name="ordinary", shared=False)(same)
    worker = Worker(app, pool=pool)
    prepare(worker)
    assert type(ordinary_pool(worker)) is pool


def test_app_without_ordinary_tasks_starts_no_processes_for_them() -> None:
    app = make_app()
    add_task(app)
    worker = Worker(app, pool=PreforkPool)
    prepare(worker)
    assert type(ordinary_pool(worker)) is OrdinaryThreads
    assert worker.pool.limit == 2


def test_autoscale_keeps_the_processes_that_it_scales() -> None:
    app = make_app()
    add_task(app)
    worker = Worker(app, pool=PreforkPool)
    worker.autoscale = (4, 1)
    prepare(worker)
    assert type(ordinary_pool(worker)) is PreforkPool


def test_only_ordinary_jobs_wait_for_a_process() -> None:
    app = make_app()
    add_task(app, "batch")
    app.task(name="ordinary", shared=False)(same)
    worker = Worker(app, pool=PreforkPool)
    prepare(worker)
    began: list[Any] = []
    for kind, name in ((BatchRequest, "batch"), (Request, "ordinary")):
        request = make_request(kind, name, execute_using_pool=began.append)
        worker.process_task(request)
    assert (began, worker.waited) == ([worker.pool], ["ordinary"])


def test_batch_job_that_was_revoked_or_is_refused_gives_no_ordinary_job_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app()
    add_task(app, "batch")
    app.task(name="ordinary", shared=False)(same)
    worker, started = Worker(app, pool=PreforkPool), list[str]()
    controller: Any = WorkController
    monkeypatch.setattr(Worker, "_process_task", controller._process_task)
    worker.consumer = Mock()
    worker.semaphore = LaxBoundedSemaphore(1)
    monkeypatch.setattr(Worker, "_quick_release", worker.semaphore.release, raising=False)
    prepare(worker)
    for name in ("runs", "waits"):
        worker.semaphore.acquire(started.append, name)
    for error in (TaskRevokedError(), ValueError("unreadable")):
        request = make_request(BatchRequest, "batch", execute_using_pool=Mock(side_effect=error))
        worker.process_task(request)
    assert started == ["runs"]
    worker.consumer.end_unhandled.assert_called_once()
    # An ordinary one has a place, which others may have.
    revoked = Mock(side_effect=TaskRevokedError())
    worker._process_task(make_request(Request, "ordinary", execute_using_pool=revoked))
    assert started == ["runs", "waits"]


def make_request(kind: type, name: str, **methods: Any) -> Any:
    made: Any = type(kind.__name__, (kind,), {"name": name, "message": None, **methods})
    return made.__new__(made)


@OWN_QUEUES
@pytest.mark.parametrize(
    ("consumed", "served"),
    [
        (None, {"free", "routed", "own", "embed"}),
        (["celery"], {"free"}),
        (["theirs", "embed"], {"free", "routed", "own", "embed"}),
    ],
)
def test_task_routed_to_another_worker_s_queue_is_not_served(
    consumed: list[str] | None, served: set[str]
) -> None:
    app = make_app()
    app.conf.task_routes = {"routed": {"queue": "theirs"}}
    tasks = [add_task(app, "free"), add_task(app, "routed"), add_task(app, "own", queue="theirs")]
    tasks.append(register(app, "embed", Model))
    queues: Any = app.amqp.queues
    queues.select_add("embed")
    if consumed is None:
        queues.select_add("theirs")
    else:
        queues.select(consumed)
    assert {task.name for task in tasks if is_served(task)} == served


def test_worker_that_serves_no_batch_task_keeps_its_pool() -> None:
    app = make_app()
    register(app, "embed", Model)
    app.amqp.queues.select(["celery"])
    worker = Worker(app, pool=PreforkPool)
    prepare(worker)
    assert type(worker.pool) is PreforkPool
    assert worker.prefetch_multiplier == 4


def test_no_queue_choice_consumes_the_queues_of_all_models() -> None:
    app = make_app()
    register(app, "embed", Model)
    register(app, "classify", Model, queue="gpu")
    prepare(Worker(app))
    assert set(app.amqp.queues.consume_from) == {"celery", "embed", "gpu"}


def test_queues_of_models_that_are_left_out_are_not_consumed() -> None:
    app = make_app()
    register(app, "embed", Model)
    register(app, "classify", Model, queue="gpu")
    with click.Context(click.Command("worker")) as context:
        context.params["exclude_queues"] = ["gpu"]
        prepare(Worker(app))
    assert set(app.amqp.queues.consume_from) == {"celery", "embed"}


def test_model_whose_queue_the_app_does_not_create_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    app.conf.task_create_missing_queues = False
    register(app, "embed", Model)
    assert "task 'embed': its queue 'embed' is not among task_queues" in refused(
        Worker(app), caplog
    )


def test_a_queue_choice_is_kept() -> None:
    app = make_app()
    register(app, "embed", Model)
    app.amqp.queues.select(["celery"])
    prepare(Worker(app))
    assert set(app.amqp.queues.consume_from) == {"celery"}


def refused(worker: Worker, caplog: pytest.LogCaptureFixture) -> str:
    with pytest.raises(SystemExit) as ended:
        prepare(worker)
    assert ended.value.code == 2
    (record,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "\n" not in record.getMessage()
    return record.getMessage()


def test_a_wrong_setting_ends_the_worker_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(max_batch_size=0)
    add_task(app)
    assert "max_batch_size = 0" in refused(Worker(app), caplog)


def test_a_wrong_model_setting_found_at_finalize_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app(models={"embed": {"kind": "poetry", "model": "x"}})
    app.finalize()
    assert "models.embed.kind" in refused(Worker(app), caplog)


def test_disabled_prefetch_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    app.conf.worker_disable_prefetch = True
    add_task(app)
    assert "worker_disable_prefetch" in refused(Worker(app), caplog)


@pytest.mark.parametrize(
    "option",
    [
        {"max_batch_size": 0},
        {"max_batch_size": -1},
        {"max_batch_size": "64"},
        {"max_batch_size": 2.5},
        {"max_batch_size": True},
        {"max_batch_tokens": 0},
        {"max_wait_ms": -1},
        {"max_wait_ms": "soon"},
        {"max_wait_ms": float("nan")},
        {"cache": True},
        {"cache": ""},
        {"cache": 1},
        {"cache_ttl_s": 0},
        {"cache_max_bytes": 0.5},
    ],
)
def test_an_impossible_task_option_ends_the_worker(
    option: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    add_task(app, "odd", **option)
    (name,) = option
    assert f"task 'odd': {name} = {option[name]!r}" in refused(Worker(app), caplog)


def add_function(app: Celery, function: Callable[..., Any], **options: Any) -> None:
    app.finalize()
    decorate: Any = app.task(base=BatchTask, shared=False, name="odd", **options)
    decorate(function)


def same(items: list[Any]) -> list[Any]:
    return items


def seeing(task: BatchTask, items: list[Any]) -> list[Any]:
    return [task.name, *items]


def test_a_cache_for_a_function_that_sees_its_requests_ends_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    add_function(app, seeing, bind=True, cache="1")
    assert "task 'odd': its function sees the requests" in refused(Worker(app), caplog)


@pytest.mark.parametrize("backend", ["cache+memory://", None], ids=["memory", "none"])
def test_a_cache_without_redis_ends_the_worker(
    backend: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    app.conf.update(result_backend=backend)
    add_function(app, same, cache="1")
    assert "task 'odd': cache needs Celery's result backend for Redis" in refused(
        Worker(app), caplog
    )


def test_a_cache_in_redis_is_fine() -> None:
    app = make_app()
    app.conf.update(result_backend="redis://localhost:1/0")
    add_function(app, same, cache="1", cache_ttl_s=60, cache_max_bytes=1)
    prepare(Worker(app))


def test_a_memory_limit_is_warned_of_where_the_system_does_not_say_what_a_process_holds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(device_max_memory_bytes=10)
    add_task(app)
    worker = Worker(app)
    monkeypatch.setattr(bootstep, "resident_kib", lambda _: 1)
    prepare(worker)
    assert not caplog.text
    monkeypatch.setattr(bootstep, "resident_kib", lambda _: None)
    worker.pool = OrdinaryThreads(2, app=app)
    prepare(worker)
    assert "device_max_memory_bytes has no effect" in caplog.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((700, 10, 10), bootstep.GC_THRESHOLDS),
        ((2000, 10, 0), bootstep.GC_THRESHOLDS),
        ((1000, 1, 1), (1000, 1, 1)),
    ],
)
def test_garbage_is_looked_for_less_often_unless_somebody_chose_otherwise(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    stock = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        app = make_app()
        add_task(app)
        worker = Worker(app)
        BatchStep(worker).create(worker)
        assert gc.get_threshold() == after
    finally:
        gc.set_threshold(*stock)


def test_worker_that_does_not_accept_the_jobs_of_a_task_is_refused() -> None:
    app = Celery("pickles", set_as_current=False)

    @app.task(base=BatchTask, shared=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    task: Any = shout
    for accepted in (["json"], ["application/json", "pickle"], {"json", "yaml"}):
        app.conf.accept_content = accepted
        check_is_accepted(app, task)
    app.conf.accept_content = ["pickle"]
    with pytest.raises(SettingsError, match="add 'json' to accept_content"):
        check_is_accepted(app, task)
    task.serializer = "auth"
    with pytest.raises(SettingsError, match=r"call app.setup_security\(\) if messages are signed"):
        check_is_accepted(app, task)


def test_worker_whose_task_was_made_before_its_messages_were_to_be_signed_is_refused() -> None:
    app = Celery("late", set_as_current=False)

    @app.task(base=BatchTask, shared=False, lazy=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    task: Any = shout
    app.conf.update(task_serializer="auth", accept_content=["application/data"])
    with pytest.raises(SettingsError, match="jobs are not signed"):
        check_is_accepted(app, task)


def test_a_task_of_an_app_that_signs_its_messages_signs_its_own() -> None:
    app = Celery("signing", set_as_current=False)
    app.conf.task_serializer = "auth"

    @app.task(base=BatchTask, shared=False, lazy=False)
    def shout(texts: list[str]) -> list[str]:
        return texts

    assert (shout.serializer, BatchTask.serializer) == ("auth", "json")


def test_results_that_no_caller_would_read_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("unread", set_as_current=False)
    warn_of_unread_results(app)
    app.conf.result_accept_content = ["json"]
    app.conf.accept_content = ["application/data"]
    warn_of_unread_results(app)
    assert not caplog.records
    app.conf.result_accept_content = None
    warn_of_unread_results(app)
    assert "result_accept_content = ['json']" in caplog.text


def pay() -> None:
    """Any task."""


@OWN_QUEUES
@pytest.mark.parametrize(
    ("queue", "is_warned_of"), [("embde", True), ("reports", False), ("embed2", False)]
)
def test_a_misspelt_queue_is_warned_of_where_other_tasks_have_no_route(
    queue: str, is_warned_of: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs of a task without a route may come by any queue."""
    with Celery("shop", set_as_current=False) as app:
        app.conf.task_routes = {"embed": {"queue": "embed"}}
        for name in ("embed", "pay"):
            app.task(name=name, shared=False, lazy=False)(pay)
        app.task(name="own", shared=False, lazy=False, queue="embed2")(pay)
        app.amqp.queues.select([queue])
        warn_of_unused_queues(app)
    assert ("the nearest is embed" in caplog.text) is is_warned_of
