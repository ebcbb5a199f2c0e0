"""The batch task: an ordinary Celery task whose function gets the items of many jobs at once."""

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from celery import VERSION, Celery, Task, __version__, uuid
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context
from celery.canvas import Signature, chunks, group, maybe_signature
from celery.exceptions import TimeLimitExceeded, WorkerLostError
from celery.result import AsyncResult, ResultSet, allow_join_result
from celery.signals import worker_ready
from celery.utils.imports import symbol_by_name
from celery.utils.time import maybe_make_aware
from kombu import Producer
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads

from batchery.completion import current_completion
from batchery.errors import BatchArgumentError, DeviceDied, InvalidItem, StartError
from batchery.execution.batch import read_back, run_function
from batchery.execution.item_models import ItemModels, check_function
from batchery.installation import get_queue_limits, get_redis_url
from batchery.outcomes import Answered, Failed, Ignore, Reject, Replace, RetryAfter
from batchery.protocol import headers as multi_item
from batchery.protocol.headers import HEADER, deadline_header, sent_now, with_tenant
from batchery.queue_limits import QueueLimits, check_room, find_destination
from batchery.request import BatchContext, JobContext, bind_request
from batchery.settings import nearest_name
from batchery.shards import acquire_producer

if VERSION[:2] < (5, 7):
    raise StartError(f"Celery {__version__} is too old: pip install -U 'celery[redis]>=5.7'")

logger = logging.getLogger(__name__)

#: Names of Celery's positional arguments of `apply_async` behind `args` and `kwargs`.
POSITIONAL = ("task_id", "producer", "link", "link_error", "shadow")

#: Sends many jobs at once; an import path, because the producer's package imports this one.
SEND_MANY = "batchery_producer.submit_many:send_many"

#: Sends a job, and yields its partial results; the same.
STREAM_JOB = "batchery_producer.client:stream_job"

#: Options that jobs of a chain, group or chord have, callbacks, and jobs that are tried again. They
#: have room in every class: half a workflow would be worse than a long queue.
WORKFLOW_OPTIONS = ("producer", "reply_to", "parent_id", "root_id", "group_id", "chord", "retries")

#: Options of many jobs that a message names; and what else `apply_async` and kombu know.
SEND_OPTIONS = (
    *("compression", "countdown", "deadline_s", "eta", "exchange", "expiration", "expires"),
    *("headers", "ignore_result", "link", "link_error", "priority", "queue", "retry_policy"),
    *("routing_key", "serializer", "shadow", "soft_time_limit", "tenant", "time_limit"),
)
#: Those of them that only a batch task has.
BATCH_OPTIONS = ("deadline_s", "tenant")
OTHER_SEND_OPTIONS = {
    *inspect.signature(Celery.send_task).parameters,
    *inspect.signature(Producer.publish).parameters,
    *("app_id", "argsrepr", "correlation_id", "exchange_type", "kwargsrepr", "message_id"),
    *("stamped_headers", "timestamp", "type", "user_id"),
} - {"args", "kwargs", "name", "options", "properties", "self"}

#: Options that say where a job goes.
DESTINATIONS = ("queue", "exchange", "routing_key")

#: Minimum number of items that are sent in bulk: fewer are not worth a connection of their own.
MIN_BULK_ITEMS = 16


_Chunks: Any = chunks


class ItemChunks(_Chunks):  # type: ignore[misc]
    """Celery's `chunks`, of jobs that carry the items of a chunk."""

    def group(self) -> Any:
        """The jobs."""
        task, it, n = self._unpack_args(self.kwargs)
        rest = iter(it)
        parts = iter(lambda: list(islice(rest, n)), [])
        return group((task.type.starmap(part) for part in parts), app=self._app)


#: What happens to a process, and so is no failure of the function that may be retried.
LOST = (DeviceDied, TimeLimitExceeded, WorkerLostError)


class Delivery:
    """Turns one outcome into what Celery expects of a task: a value or an exception.

    It takes the task's place in Celery's autoretry, so that `autoretry_for` sees the exception of
    one job. Everything except `run` is the task's, and as in Celery no job that killed its process,
    or was killed for its time limit, is retried.
    """

    def __init__(self, task: "BatchTask") -> None:
        self.__dict__["_task"] = task
        excepted = tuple(getattr(task, "dont_autoretry_for", ()))
        self.__dict__["dont_autoretry_for"] = (*excepted, *LOST)
        add_autoretry_behaviour(self)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)

    def run(self, outcome: Any) -> Any:
        """Returns the value, or raises what Celery expects instead of one."""
        if isinstance(outcome, Failed):
            raise outcome.exception
        if isinstance(outcome, Ignore | Reject):
            raise outcome
        if isinstance(outcome, RetryAfter):
            raise self._task.retry(countdown=float(outcome.seconds), exc=outcome.exception)
        if isinstance(outcome, Replace):
            return self._replace(outcome.signature)
        return outcome

    def _replace(self, signature: Signature[Any]) -> Any:
        # A signature from a device is plain data, without an app.
        whole: Any = maybe_signature(signature, app=self._task.app)
        if self._task.request.called_directly:
            # No caller waits for another job, so that one runs here, as this one does.
            with allow_join_result():
                return whole.apply().get()
        return self._task.replace(whole)


if TYPE_CHECKING:
    _Task = Task[..., Any]
else:
    _Task = Task


#: Celery's serializer of signed messages, which signs JSON; `app.setup_security()` makes it known.
SIGNED = "auth"


class BatchTask(_Task):
    """Base class of batch tasks: `@app.task(base=BatchTask, max_batch_size=64)`.

    The function takes a list of items and returns one outcome per item, in order. To Celery and to
    callers it is a task of one item: `task.delay(item).get()`. If it is called directly or eagerly,
    or runs on another pool than Batchery's, it runs a batch of one.
    """

    abstract = True

    #: Maximum number of items in a batch; None takes the setting of that name, here and below.
    max_batch_size: int | None = None
    #: Maximum number of tokens of one forward pass, with padding; for tasks that are models.
    max_batch_tokens: int | None = None
    #: Maximum number of items of a `StepModel` at once; None for all other tasks.
    slots: int | None = None
    #: How long an idle device waits for a batch to fill, in milliseconds.
    max_wait_ms: float | None = None
    #: How long jobs may take in a worker, in milliseconds: batches are only so large.
    target_latency_ms: float | None = None
    #: Version of its results. If it is set, equal items are computed once, and their results kept.
    #: Different versions share nothing.
    cache: str | None = None
    #: How long such a result is kept, in seconds.
    cache_ttl_s: float | None = None
    #: What `pydantic=True` makes of items and outcomes; None without it.
    item_models: ItemModels | None = None

    # A job stays in Redis until its result is stored.
    acks_late = True
    serializer = "json"
    # A caller's mistake is one line in the worker's log, as any exception that Celery expects.
    throws = (InvalidItem, BatchArgumentError)
    Request = "batchery_worker.request:BatchRequest"

    #: What runs its batches on a device: the path of a class, see `device/runner.py`.
    Runner = "batchery_worker.device.functions:FunctionRunner"

    #: What reads its items beside a device, before they are in any batch: the path of a class, see
    #: `dispatch/being_read.py`. None if its batches have them as they came.
    Readers: str | None = None

    # Celery's autoretry wraps `run` unless it finds this name. Here `run` takes a whole batch, so
    # the retry is wrapped around one job's outcome instead: see `Delivery`.
    _orig_run = None

    if TYPE_CHECKING:

        @property
        def request(self) -> BatchContext:
            """Celery's request; inside the function, a view of all jobs of the batch."""

        #: Celery's; with `pydantic=True`, it writes a caller's models as plain data.
        _dump_pydantic_arguments: Any

    @cached_property
    def sees_request(self) -> bool:
        """Whether the function gets `self`, and so can see the requests of its jobs."""
        return not isinstance(inspect.getattr_static(self, "run"), staticmethod)

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Celery's method. The app's own base class (`task_cls`) becomes one of this class, too.

        Celery puts `base=` in its place, and its headers and hooks would be lost silently.
        """
        own: type = app.Task.__bases__[0]
        if not issubclass(cls, own):
            # A base class that is itself a batch task takes the place of this one.
            kept = tuple(base for base in cls.__bases__ if not issubclass(own, base))
            cls.__bases__ = (*kept, own)
        check_function(cls)
        if app.conf.task_serializer == SIGNED and cls.serializer == BatchTask.serializer:
            cls.serializer = SIGNED
        return super().bind(app)

    def _get_exec_options(self) -> dict[str, Any]:
        # Celery asks here for a task's default options, in `delay` as in `send_task`.
        options: dict[str, Any] = super()._get_exec_options()  # type: ignore[misc]
        own = self.own_queue
        return options if own is None else {**options, "queue": own}

    @property
    def has_own_process(self) -> bool:
        """Whether its jobs go to device processes that serve nothing else."""
        return bool(self.slots)

    @property
    def own_queue(self) -> str | None:
        """The queue that is named like it, which it has without a route; None if it has one."""
        options = super()._get_exec_options()  # type: ignore[misc]
        if any(options.get(name) is not None for name in DESTINATIONS):
            return None
        try:
            if self.app.amqp.router.lookup_route(self.name, (), {}, {}, type(self)):
                return None
        except Exception:  # noqa: BLE001 - it is the app's own code
            return None
        queues: Any = self.app.amqp.queues
        return self.name if queues.create_missing or self.name in queues else None

    @classmethod
    def on_bound(cls, app: Celery) -> None:  # noqa: ARG003 - as Celery calls it
        """Celery's hook. A worker will say when it is ready what batch tasks lack in its app."""
        worker_ready.connect(_warn_of_app)

    @property
    def is_installed(self) -> bool:
        """Whether a worker of its app runs it in batches, which takes `install(app)`."""
        return any(str(step).startswith("batchery_worker.") for step in self.app.steps["worker"])

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Answers one job: with the outcome from a device, or by running a batch of one."""
        completion = current_completion()
        if completion is not None and completion.answers(self.request.id):
            outcome = completion.answer()
        else:
            outcome = self._run_here(only_item(self.name, args, keywords), keywords)
        return self._delivery.run(outcome)

    def _run_here(self, argument: Any, keywords: Mapping[str, Any]) -> Any:
        request: Context = self.request
        own = request.args is not None and len(request.args) == 1 and request.args[0] is argument
        try:
            header = (request.headers or {}).get(HEADER) if own else None
            items, form = multi_item.read_items(argument, header)
        except InvalidItem as error:
            return Failed(error)
        # A direct call inside another job is not that job: its request says nothing about the call.
        state = vars(request if own else Context(args=[argument], kwargs=dict(keywords)))
        around = partial(self._bind_request, state)
        outcomes = run_function(self.run, items, keywords, around=around, models=self.item_models)
        if request.is_eager:
            outcomes = list(map(read_back, outcomes))
        return multi_item.build_outcome(outcomes, form)

    def run_batch(self, items: list[Any], keywords: Mapping[str, Any]) -> list[Any]:
        """Runs one batch in this process; returns one outcome per item, in order."""
        return run_function(self.run, items, keywords, models=self.item_models)

    def _bind_request(
        self, state: dict[str, Any], part: Sequence[int]
    ) -> AbstractContextManager[None]:
        job = JobContext(state, range(len(part)))
        return bind_request(self, BatchContext(lambda: [job], state))

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Exception | None = None,
        throw: bool = True,
        eta: Any = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """As Celery's `retry`; inside the function on a device, the outcome `RetryAfter`.

        Raises:
            BatchArgumentError: On a device, for an argument that this outcome has no place for.
        """
        if not self._in_batch:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        if options or (args, kwargs, max_retries) != (None, None, None):
            raise BatchArgumentError(
                f"{self.name}: in a batch, self.retry takes exc, countdown, eta and throw;"
                " answer Replace(self.s(...).set(...)) for another item or other options"
            )
        if eta is not None:
            aware: Any = maybe_make_aware(eta, self.app.timezone)
            countdown = max(0.0, (aware - self.app.now()).total_seconds())
        seconds = self.default_retry_delay if countdown is None else countdown
        return self._answer(RetryAfter(seconds, exc), throw)

    def replace(self, sig: Signature[Any]) -> Any:
        """As Celery's `replace`; inside the function on a device, the outcome `Replace`."""
        return self._answer(Replace(sig)) if self._in_batch else super().replace(sig)

    @property
    def _in_batch(self) -> bool:
        """Whether the function of a batch is running, outside of Celery's tracer."""
        return isinstance(self.request, BatchContext) and self.request.called_directly

    @staticmethod
    def _answer(outcome: RetryAfter | Replace, throw: bool = True) -> Any:
        if throw:
            raise Answered(outcome)
        return outcome

    @cached_property
    def _delivery(self) -> Delivery:
        return Delivery(self)

    def apply_async(
        self,
        args: Iterable[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *positional: Any,
        tenant: str | None = None,
        deadline_s: float | None = None,
        **options: Any,
    ) -> AsyncResult[Any]:
        """Sends one job, as `Task.apply_async` does.

        Args:
            args: The item, alone.
            kwargs: The keyword arguments.
            positional: As Celery has them.
            tenant: For whom the job runs. Tenants of one priority class have equal shares of it.
            deadline_s: In how many seconds the job should be answered. In its lane it goes before
                jobs that have more time.
            options: As Celery has them.

        Raises:
            BatchArgumentError: There is not exactly one positional argument, or the deadline is no
                number above 0.
            InvalidItem: The tenant is no name, or the message is larger than a worker reads.
            QueueFull: The priority class of the job is full.
        """
        args = tuple(args or ())
        only_item(self.name, args, kwargs)
        limits = get_queue_limits(self.app)
        if limits is not None and not positional:
            self._check_room(limits, options)
        if tenant is not None and "tenant" in (options.get("stamped_headers") or ()):
            # Celery gives the value of a stamp as an option of its name.
            options, tenant = {**options, "tenant": tenant}, None
        if tenant is not None:
            options = with_tenant(options, tenant)
        headers = {**(options.get("headers") or {}), **deadline_header(deadline_s)}
        # A retry and the next step of a chain inherit headers, and are sent anew.
        options["headers"] = {**headers, **sent_now()}
        try:
            return self._publish(args, kwargs, *positional, **options)
        except EncodeError as error:
            if hasattr(args[0], "tolist"):
                raise refuse_item(args[0], error) from error
            raise

    def _publish(self, *arguments: Any, **options: Any) -> AsyncResult[Any]:
        """Sends a job as Celery does, to the Redis that has its queue."""
        if get_redis_url(self.app) is None or self.app.conf.task_always_eager:
            return super().apply_async(*arguments, **options)
        args, kwargs, *others = arguments
        options.update(zip(POSITIONAL, others, strict=False))
        queue = find_destination(self.app, self.name, options).queue
        # What a caller gives is for the broker.
        options.pop("connection", None)
        with acquire_producer(self.app, queue, options.get("producer")) as options["producer"]:
            return super().apply_async(args, kwargs, **options)

    def apply(self, args: Any = None, kwargs: Any = None, *others: Any, **options: Any) -> Any:
        """As Celery's `apply`; arguments and results are what a worker would make of them.

        Raises:
            EncodeError: JSON cannot write the arguments; kombu's error, as `delay` raises it.
        """
        if self._dump_pydantic_arguments is not None:
            args, kwargs = self._dump_pydantic_arguments(args, kwargs)
        kind, encoding, text = dumps((tuple(args or ()), kwargs or {}), self.serializer)
        args, kwargs = loads(text, kind, encoding, accept={kind})
        return super().apply(args, kwargs, *others, **options)

    def _check_room(self, limits: QueueLimits, options: dict[str, Any]) -> None:
        in_workflow = any(options.get(name) is not None for name in WORKFLOW_OPTIONS)
        if not in_workflow and not self.app.conf.task_always_eager:
            where = find_destination(self.app, self.name, options)
            check_room(limits, where, partial(acquire_producer, self.app))

    def stream(self, item: Any, *, timeout_s: float | None = None, **keywords: Any) -> Any:
        """Sends one job, and yields its partial results while it runs, as `TaskClient.stream` does.

        Args:
            item: The item.
            timeout_s: How long to wait for each partial result, in seconds; None for ever.
            keywords: Keyword arguments of the job.

        Returns:
            A `batchery.PieceStream`.

        Raises:
            SettingsError: The app's result backend is no Redis.
            GaveUp: Redis stays away.
            Exception: What `delay` raises.
        """
        return symbol_by_name(STREAM_JOB)(self, item, timeout_s, keywords)

    def map(self, it: Iterable[Any]) -> Any:
        """As Celery's `map`, in one job that carries all items, so that a device runs them.

        Raises:
            InvalidItem: There are more items than a job may have.
        """
        items = list(it)
        multi_item.check_map(len(items))
        if not items:
            # Nothing is called; Celery's own task answers with an empty list.
            return super().map(items)
        carried: Any = {"v": multi_item.VERSION, "n": len(items), "values": True}
        return self.signature((items,), immutable=True, headers={HEADER: carried})

    def starmap(self, it: Iterable[Any]) -> Any:
        """As Celery's `starmap`, where each tuple has one element, the item; see `map`.

        Raises:
            BatchArgumentError: A tuple has another number of elements.
            InvalidItem: There are more items than a job may have.
        """
        return self.map([only_item(self.name, args) for args in it])

    def chunks(self, it: Iterable[Any], n: int) -> Any:
        """As Celery's `chunks`, each chunk as one job of `starmap`."""
        made: Any = ItemChunks
        return made(self.s(), it, n, app=self.app)

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
            options: Options of `apply_async`, for all jobs.

        Returns:
            The results, in the order of the items.

        Raises:
            BatchArgumentError: There is no such option.
            OperationalError: No broker answers; kombu's error.
            BrokerRefused: The broker takes no jobs.
            QueueFull: The priority class of the jobs is full, and refuses them. The first `sent`
                are in the queue.
        """
        check_options(f"{self.name}: submit_many", options, self)
        items = list(items)
        own = {"producer", "connection"} & set(options)
        is_bulk = len(items) >= MIN_BULK_ITEMS or get_queue_limits(self.app) is not None
        if is_bulk and not own and not self.app.conf.task_always_eager:
            send_many: Any = symbol_by_name(SEND_MANY)
            return cast(ResultSet, send_many(self, items, keywords or {}, options))
        with self.app.producer_or_acquire(options.pop("producer", None)) as producer:
            jobs = [
                self.apply_async((item,), keywords, task_id=uuid(), producer=producer, **options)
                for item in items
            ]
        return JobSet(jobs, app=self.app)


class JobSet(ResultSet):
    """Celery's set of results, whose `get` is `join`: the other way awaits one message too many."""

    supports_native_join = False


def refuse_item(item: Any, error: Exception) -> EncodeError:
    """The error of kombu for an item that cannot be serialized; the text names the item."""
    hint = "; send its tolist()" if hasattr(item, "tolist") else ""
    return EncodeError(f"item {item!r:.80}: {error}{hint}")


def check_options(
    caller: str, options: Mapping[str, Any], task: Any = None, own: Iterable[str] = ()
) -> None:
    """Checks options of `apply_async`: Celery ignores a misspelt one silently.

    Args:
        caller: What was called, for the message.
        options: By their names.
        task: The task; None if the app does not have it.
        own: Names of the arguments that the caller has besides.

    Raises:
        BatchArgumentError: There is no such option.
    """
    if {each for each in type(task).__mro__ if "apply_async" in vars(each)} - {Task, BatchTask}:
        # A class of the user may have more options.
        return
    foreign = () if isinstance(task, BatchTask) else BATCH_OPTIONS
    named = sorted({*SEND_OPTIONS}.difference(foreign).union(own))
    # A stamp's value is an option of its name.
    unknown = set(options).difference(
        named, OTHER_SEND_OPTIONS, options.get("stamped_headers") or ()
    )
    if unknown:
        wrong = min(unknown)
        raise BatchArgumentError(
            f"{caller} has no option {wrong!r}{nearest_name(wrong, named)}; keyword arguments of"
            f" the task go into keywords={{...}}, and options are {', '.join(named)}"
        )


def only_item(
    name: str, args: tuple[Any, ...] | list[Any], keywords: Mapping[str, Any] | None = None
) -> Any:
    """The item of a job.

    Args:
        name: Name of the task.
        args: The positional arguments.
        keywords: The others; the item may be one of them by mistake.

    Raises:
        BatchArgumentError: There is none, or more than one positional argument.
    """
    if not args and keywords:
        given = ", ".join(f"{keyword}=" for keyword in keywords)
        raise BatchArgumentError(
            f"{name} takes exactly one positional argument, the item, but got 0, and {given:.200};"
            " give the item without a name"
        )
    if len(args) != 1:
        raise BatchArgumentError(
            f"{name} takes exactly one positional argument, the item, but got {len(args)};"
            " pass options as keywords, and several items as several jobs (submit_many)"
        )
    return args[0]


def _warn_of_app(sender: Any, **_: Any) -> None:
    tasks = [task for task in sender.app.tasks.values() if isinstance(task, BatchTask)]
    own = sender.app.Task.__bases__[0]
    if tasks and own.__call__ is not Task.__call__ and not issubclass(own, BatchTask):
        logger.warning(
            "%s: %s.__call__ is not called, as a batch has many jobs; do what it does in the"
            " function, or in before_start and after_return",
            ", ".join(sorted(task.name for task in tasks)),
            own.__name__,
        )
    if tasks and not tasks[0].is_installed:
        logger.warning(
            "%s: runs one by one in this worker; call batchery.install(app) where the app is made",
            ", ".join(sorted(task.name for task in tasks)),
        )
