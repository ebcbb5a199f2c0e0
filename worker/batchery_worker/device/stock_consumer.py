"""Celery's own consumer in a device process: what is not plain is handled by Celery's own code.

It has neither a connection nor an event loop. The device hands it messages, and drives its timer.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import redis
from celery import Celery
from celery.exceptions import TaskRevokedError
from celery.worker import state as worker_state
from kombu.asynchronous.timer import Timer
from kombu.common import QoS
from kombu.transport import virtual
from kombu.utils.imports import symbol_by_name

from batchery.task import BatchTask
from batchery.transport.lease_store import LeaseStore
from batchery_worker.consumer import GuardedConsumer, bound_decompression
from batchery_worker.forwarding import forward_lease
from batchery_worker.in_flight import TaskCall
from batchery_worker.job import TimeLimits

_Message: Any = virtual.Message

#: Takes in a call of a batch task, with its soft and hard time limit.
Admit = Callable[[TaskCall, Any, TimeLimits], None]


class MessageChannel:
    """What a message, and Celery's request, need of the channel that brought it."""

    no_ack_consumers = None

    def __init__(self, accept: Collection[str] | None) -> None:
        """Of messages whose bodies may be of these content types; None for all that are enabled."""
        self._accept = accept
        self._codec = virtual.Base64()

    def decode_body(self, body: Any, encoding: str | None = None) -> Any:
        """Undoes the encoding in which a body stands in a queue."""
        return self._codec.decode(body) if encoding == "base64" else body

    def message_to_python(self, payload: Any) -> Any:
        """Makes a message of what stands in a queue."""
        message = _Message(payload, channel=self)
        message.accept = self._accept
        return message


class LeaseChannel(MessageChannel):
    """The channel of a message that is leased."""

    def __init__(
        self,
        lease_store: LeaseStore,
        prepare_anew: Callable[[], None],
        accept: Collection[str] | None,
    ) -> None:
        """Of a message whose lease is in that store.

        Args:
            lease_store: It stays, whichever broker the device goes to.
            prepare_anew: Has leases compared with Redis.
            accept: Content types of bodies that may be read; None for all that are enabled.
        """
        super().__init__(accept)
        self.lease_store = lease_store
        self._prepare_anew = prepare_anew

    def basic_ack(self, token: str, multiple: bool = False) -> None:  # noqa: ARG002
        """Ends a lease: its job is settled."""
        self.lease_store.ack(token)

    def basic_reject(self, token: str, requeue: bool = False) -> None:
        """Drops a message, or gives it back to the end of its queue."""
        if requeue:
            try:
                self.lease_store.requeue([token], first=False)
            except (redis.RedisError, OSError):
                # Whoever rejects it may only log that, and nobody else remembers the message.
                self._prepare_anew()
                raise
        else:
            self.lease_store.ack(token)


class EtaTimer(Timer):
    """Celery's timer, on which nobody waits for long: those jobs wait in Redis."""

    def __init__(self, postpone: Callable[[Any, float], bool], max_interval: float) -> None:
        """Has nothing to call.

        Args:
            postpone: Lets a request wait elsewhere until its time, on the clock of
                `time.monotonic`, if it can; whether it does.
            max_interval: As of kombu's.
        """
        super().__init__(max_interval=max_interval)
        self._postpone = postpone

    def call_at(self, eta: Any, fun: Any, args: Any = (), *more: Any, **named: Any) -> Any:
        """Calls a function at the time of a request, its first argument."""
        if self._postpone(args[0], eta):
            # Once Celery has noted that it waits here.
            return self.call_after(0.0, worker_state.task_ready, args[:1])
        return super().call_at(eta, fun, args, *more, **named)


class CallPool:
    """The pool of that consumer: it makes a call of each request that Celery hands over."""

    is_green = signal_safe = uses_semaphore = False
    num_processes = limit = 1
    flush = None

    def __init__(self, admit: Admit, cancel: Callable[[str], None], limits: TimeLimits) -> None:
        """Remembers what takes calls in; `limits` are those of the worker's command line."""
        self._admit = admit
        self._cancel = cancel
        self._limits = limits

    def apply_async(self, *_: Any, **options: Any) -> None:
        """Takes a job from Celery's request."""
        request = options["callback"].__self__
        hard, soft = request.time_limits
        limits = self.choose_limits(request.task, soft, hard)
        self._admit(TaskCall(request), request.task, limits)

    def choose_limits(self, task: Any, soft: float | None, hard: float | None) -> TimeLimits:
        """The soft and the hard limit of a job: its own, its task's, or the command line's."""
        own_soft, own_hard = self._limits
        soft, hard = soft or task.soft_time_limit, hard or task.time_limit
        return soft or own_soft, hard or own_hard

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Ends nothing: a device has jobs of others, too."""

    def cancel_job(self, job_id: str) -> None:
        """Ends what a job that was terminated while it runs has for itself."""
        self._cancel(job_id)


class StockConsumer(GuardedConsumer):
    """Reads messages as Celery's worker does: revoked and expired jobs, ETA, rates, refusals."""

    def __init__(
        self,
        app: Celery,
        hostname: str,
        pool: CallPool,
        timer: Any,
        eventer: Any,
        find_list: Callable[[Any, str], str],
        is_here: Callable[[BatchTask], bool],
    ) -> None:
        """Reads no message yet.

        Args:
            app: The device's.
            hostname: Of the worker.
            pool: Takes what may run.
            timer: Celery's requests with an ETA wait there.
            eventer: Sends task events.
            find_list: Where a task's jobs belong that this device cannot run, for the list that one
                came by.
            is_here: Whether this device serves a task.
        """
        self.app = app
        self.hostname = hostname
        self.pool = pool
        self.timer = timer
        self.event_dispatcher = eventer
        self.hub = None
        # It counts nothing: a device takes what it can begin.
        self.qos = QoS(lambda **_: None, 0)
        self.controller = SimpleNamespace(
            state=worker_state, semaphore=None, app=app, consumer=self
        )
        self.strategies: dict[str, Any] = {}
        connection = app.connection_for_read()
        self.connection_errors = connection.connection_errors
        self.on_task_message: set[Any] = set()
        self.disable_rate_limits = bool(app.conf.worker_disable_rate_limits)
        self.restart_count = 0
        self._maximum_prefetch_restored = True
        self._limit_order = 0
        self._pending_operations: deque[Any] = deque()
        self.task_buckets: Mapping[str, Any] = defaultdict(lambda: None)
        self.reset_rate_limits()
        bound_decompression()
        self.update_strategies()
        for name, task in app.tasks.items():
            if not (isinstance(task, BatchTask) and is_here(task)):
                self.strategies[name] = forward_lease(partial(find_list, task))
        self.handle = self.create_task_handler()

    def make_request(self, message: Any) -> Any:
        """Makes Celery's request of a message that was checked."""
        task = self.app.tasks[message.headers["task"]]
        return symbol_by_name(task.Request)(
            message,
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            app=self.app,
            hostname=self.hostname,
            eventer=self.event_dispatcher,
            task=task,
            connection_errors=self.connection_errors,
            body=message.body,
            headers=message.headers,
            decoded=False,
            utc=self.app.uses_utc_timezone(),
        )

    def on_task_request(self, request: Any) -> None:
        """Hands a job to the pool, also one that has waited before; refuses it if that raises."""
        try:
            with suppress(TaskRevokedError):
                request.execute_using_pool(self.pool)
        except Exception as error:  # noqa: BLE001 - it would end worker after worker
            self.end_unhandled(request.message, error)

    def _restore_prefetch_count_after_connection_restart(self, *_: Any) -> None:
        """Does nothing: there is no prefetch count."""
