"""The batch task: an ordinary Celery task whose function is given many jobs' items at once."""

import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from celery import Task, uuid
from celery.app.autoretry import add_autoretry_behaviour
from celery.result import AsyncResult, ResultSet
from celery.utils.imports import symbol_by_name

from batchery import packed
from batchery.errors import BatchArgumentError, InvalidItem
from batchery.execute import compute, prepare, run_function
from batchery.model import Model
from batchery.outcome import Failed, Ignore, Reject, RetryAfter

if TYPE_CHECKING:
    _Task = Task[..., Any]
else:
    _Task = Task


class Computed(NamedTuple):
    """An outcome that a device has computed, waiting for Celery's tracer to ask for it."""

    task_id: str
    outcome: Any


#: Set around the tracer by the batch pool: the task then answers with it, and computes nothing.
computed: ContextVar[Computed | None] = ContextVar("batchery_computed", default=None)


#: Threads of an ordinary pool may all want a model that is not loaded yet: one copy is enough.
_loading = threading.Lock()


class BatchTask(_Task):
    """Base class of batch tasks: `@app.task(base=BatchTask, max_batch_size=64)`.

    The function takes a list of items and returns one outcome per item, in order. To Celery and to
    callers it is a task of one item: `task.delay(item).get()`. Called directly, eagerly, or on any
    pool but Batchery's, it runs a batch of one.
    """

    abstract = True

    #: Most items in a batch; None takes the setting of that name, as below.
    max_batch_size: int | None = None
    #: Most tokens of one forward pass, padding counted; for tasks that are models.
    max_batch_tokens: int | None = None
    #: How long an idle device waits for a batch to fill, in milliseconds.
    max_wait_ms: float | None = None

    # A job stays in Redis until its result is stored.
    acks_late = True
    serializer = "json"
    Request = "batchery_worker.request:BatchRequest"

    # Celery's autoretry wraps `run` unless it finds this name. Here `run` is the function of a
    # whole batch, so retrying is wrapped around one job's outcome instead: see `_delivery`.
    _orig_run = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Answers for one job: with the outcome a device computed, or by running a batch of one."""
        known = computed.get()
        if known is not None and known.task_id == self.request.id:
            computed.set(None)
            outcome = known.outcome
        else:
            outcome = self._run_here(only_item(self.name, args), keywords)
        return self._delivery.run(outcome)

    def _run_here(self, argument: Any, keywords: Mapping[str, Any]) -> Any:
        request = self.request
        own = request.args is not None and len(request.args) == 1 and request.args[0] is argument
        try:
            header = (request.headers or {}).get(packed.HEADER) if own else None
            items, is_packed = packed.items_of(argument, header)
        except InvalidItem as error:
            return Failed(error)
        outcomes = self.run_batch(items, keywords)
        return packed.result_of(outcomes) if is_packed else outcomes[0]

    def run_batch(self, items: list[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Runs one batch in this process; returns one outcome per item, in order."""
        return run_function(self.run, items, keywords)

    @cached_property
    def _delivery(self) -> "_Delivery":
        return _Delivery(self)

    def apply_async(
        self,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *positional: Any,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Sends one job, as `Task.apply_async` does.

        Raises:
            BatchArgumentError: There is not exactly one positional argument.
        """
        args = tuple(args or ())
        only_item(self.name, args)
        return super().apply_async(args, kwargs, *positional, **options)

    def submit_many(
        self,
        items: Iterable[Any],
        keywords: dict[str, Any] | None = None,
        **options: Any,
    ) -> ResultSet:
        """Sends one job per item.

        Args:
            items: Each becomes a job of its own.
            keywords: Keyword arguments that all jobs share.
            options: Of `apply_async`, for all jobs.

        Returns:
            The results, in the order of the items.
        """
        with self.app.producer_or_acquire(options.pop("producer", None)) as producer:
            jobs = [
                self.apply_async((item,), keywords, task_id=uuid(), producer=producer, **options)
                for item in items
            ]
        return ResultSet(jobs, app=self.app)


class ModelTask(BatchTask):
    """A batch task that runs a `Model`; made by `register`."""

    abstract = True

    #: Characters of a result in logs and events: enough to tell vectors apart, not to read them.
    resultrepr_maxsize = 128

    #: Queue that its jobs are sent to, unless the call names another. Not Celery's own attribute
    #: `queue`, which Celery 6 will ignore.
    model_queue: str

    #: The class, or where to import it from: a producer has no need of the model's code.
    model: type[Model] | str
    #: Keyword arguments of its constructor.
    model_options: Mapping[str, Any] = {}

    _loaded: Model | None = None

    def run(self, items: list[Any], **keywords: Any) -> list[Any]:
        """Runs one batch with a model of this process's own, loaded on the CPU at the first call.

        For tests, scripts and other pools; Batchery's pool has its models on the devices.
        """
        prepared = prepare(self._local_model, items, keywords)
        outcomes, _, _ = compute(
            self._local_model, prepared, keywords, lambda lengths: [range(len(lengths))]
        )
        return outcomes

    def _get_exec_options(self) -> dict[str, Any]:
        # Celery's own place for a task's default options; `delay` and `send_task` both ask here.
        options = super()._get_exec_options()  # type: ignore[misc]
        return {**options, "queue": self.model_queue}

    def make_model(self) -> Model:
        """A new model, not loaded yet."""
        model = symbol_by_name(self.model) if isinstance(self.model, str) else self.model
        return cast(type[Model], model)(**self.model_options)

    @property
    def _local_model(self) -> Model:
        with _loading:
            if self._loaded is None:
                model = self.make_model()
                model.load("cpu")
                self._loaded = model
        return self._loaded


class _Delivery:
    """Turns one outcome into what Celery expects of a task: a value or an exception.

    Stands in for the task where Celery's own autoretry is applied, so that `autoretry_for` sees the
    exception of one job. Everything but `run` is the task's.
    """

    def __init__(self, task: BatchTask) -> None:
        self.__dict__["_task"] = task
        add_autoretry_behaviour(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)

    def run(self, outcome: Any) -> Any:
        """Returns a value, or raises what says that there is none."""
        if isinstance(outcome, Failed):
            raise outcome.exception
        if isinstance(outcome, Ignore | Reject):
            raise outcome
        if isinstance(outcome, RetryAfter):
            raise self._task.retry(countdown=outcome.seconds, exc=outcome.error)
        return outcome


def only_item(name: str, args: tuple[Any, ...] | list[Any]) -> Any:
    """The item of a job.

    Raises:
        BatchArgumentError: There is none, or more than one positional argument.
    """
    if len(args) != 1:
        raise BatchArgumentError(
            f"{name} takes exactly one positional argument, the item, but got {len(args)};"
            " pass options as keywords, and several items as several jobs (submit_many)"
        )
    return args[0]
