"""Completes jobs on threads, because every step of Celery's tracer may wait for Redis.

Most jobs leave only messages and a result. These are held back, and written for many jobs in one
step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import redis
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from celery.worker import state as worker_state
from kombu.utils.encoding import safe_repr

from batchery.completion import JobCompletion, completing
from batchery.fork_gate import fork_gate
from batchery.outcomes import Failed
from batchery.protocol.pieces import tell_readers
from batchery.retry import RetryDeadlineExceeded, is_away
from batchery_worker.commit.committer import CommitStatus
from batchery_worker.commit.listeners import Listeners, Stacks
from batchery_worker.completion.atomic_finish import AtomicFinisher, WithheldJob
from batchery_worker.completion.backend import (
    for_completion,
    outage_told_apart,
    publish_until_deadline,
)
from batchery_worker.completion.tracer import (
    Completion,
    Tracer,
    full_info,
    is_fenced,
    plain_info,
    raised,
)
from batchery_worker.in_flight import TaskCall
from batchery_worker.request import give_back

logger = logging.getLogger("batchery.pool")

#: Exceptions that the tracer reports, and that are not failures.
NOT_FAILURES = (Retry, Ignore, Reject)

#: Maximum number of jobs whose messages and results are written in one step. More save little, and
#: all their callers wait for the last one.
MAX_HELD_JOBS = 32


class CommittedJob(NamedTuple):
    """A job that a device has committed."""

    call: TaskCall
    #: Its result as text, for events and the log.
    text: str
    #: How long its device took, in seconds.
    runtime_s: float
    #: Its result, for what listens to it.
    value: Any
    #: Facts of its batch; None if they are not known any more.
    info: Mapping[str, Any] | None


class CompletionExecutor:
    """Threads that run the tracer."""

    def __init__(
        self,
        app: Celery,
        threads: int,
        deliver: Callable[[Callable[[], None]], None],
        on_fenced: Callable[[TaskCall], None],
        listeners: Listeners,
    ) -> None:
        """Starts no thread yet.

        Args:
            app: The app of the tasks and the result backend.
            threads: Maximum number of jobs that are completed at a time.
            deliver: Runs a callable on the pool's thread; may be called from any thread.
            on_fenced: Drops a job that another worker has now; called on the pool's thread.
            listeners: Told of the jobs that devices commit.
        """
        self._app = app
        self._deliver = deliver
        self._on_fenced = on_fenced
        self._listeners = listeners
        self.tracer = Tracer(app, listeners)
        self._waiting: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="batchery-completion")
        publish_until_deadline(app)

    def submit(self, completion: Completion) -> None:
        """Completes one job."""
        self._waiting.append(completion)
        self._submit(self._complete_next)

    def notify_listeners(
        self, jobs: Sequence[CommittedJob], on_told: Callable[[Sequence[CommittedJob]], None]
    ) -> None:
        """Calls what listens to jobs that a device has committed.

        Args:
            jobs: Of one task.
            on_told: Called on the pool's thread when all listeners have returned.
        """

        def notify() -> None:
            task = self._app.tasks[jobs[0].call.task_name]
            for_completion(task.backend)
            with Stacks(task) as stacks:
                for call, text, runtime_s, value, _ in jobs:
                    try:
                        self._listeners.after(task, call, value, text, runtime_s, stacks)
                    except BaseException:
                        # Whatever a hook raises, the job is done, and so must be its request.
                        logger.exception(
                            "what listens to %s[%s] has ended early", call.task_name, call.task_id
                        )
            self._deliver(partial(on_told, jobs))

        self._submit(notify)

    def stop(self) -> None:
        """Waits for the jobs that were submitted."""
        self._threads.shutdown()

    def _submit(self, function: Callable[[], None]) -> None:
        def run() -> None:
            with fork_gate.working():
                function()

        self._threads.submit(run)

    def _complete_next(self) -> None:
        """Completes the job that has waited longest, and others that may be finished with it."""
        completions = self._take()
        for completion in completions:
            self._complete(completion)
        held_back = [(each, each.held) for each in completions if each.held is not None]
        if held_back:
            self._finish_all(held_back)

    def _take(self) -> list[Completion]:
        taken: list[Completion] = []
        with self._lock:
            while self._waiting and len(taken) < MAX_HELD_JOBS:
                if taken and not (taken[0].may_hold and self._waiting[0].may_hold):
                    break
                taken.append(self._waiting.popleft())
        return taken

    def _complete(self, completion: Completion) -> None:
        """Runs the tracer; ends the job, unless its messages and result are held back."""
        call = completion.call
        if not completion.may_hold and is_fenced(call):
            self._drop(completion)
            return
        with self._settling(completion):
            self.tracer.run(completion)
            if completion.held is None:
                self._notify(completion)

    def _finish_all(self, jobs: Sequence[tuple[Completion, WithheldJob]]) -> None:
        """Writes what was held back, and ends the jobs."""
        try:
            with completing(JobCompletion()), outage_told_apart(self._app.backend):
                statuses = self._finisher().finish([held for _, held in jobs])
        except (redis.RedisError, RetryDeadlineExceeded):
            for completion, _ in jobs:
                with self._settling(completion):
                    raise
            return
        for (completion, held), status in zip(jobs, statuses, strict=True):
            if status is CommitStatus.COMMITTED:
                self._notify(completion, held)
            elif status is CommitStatus.FENCED or is_fenced(completion.call):
                self._drop(completion)
            else:
                with self._settling(completion):
                    self.tracer.replay(completion)
                    self._notify(completion)

    @contextmanager
    def _settling(self, completion: Completion) -> Iterator[None]:
        """Ends a job even if its completion breaks off."""
        call = completion.call
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - after any error the job must be settled
            completion.held = None
            name, text = call.task_name, safe_repr(error)
            logger.error("%s[%s] cannot be completed: %s", name, call.task_id, text)
            if call.request is not None and isinstance(error, RetryDeadlineExceeded):
                self._end(completion, lambda _: _give_back(call), None)
                return
            outcome = completion.outcome
            cause = outcome.exception if isinstance(outcome, Failed) else error
            plain = plain_info(cause, error.__traceback__)
            info = full_info(error, plain)
            self._end(completion, partial(_fail, call, plain), info, type(error).__name__)

    def _notify(self, completion: Completion, held: WithheldJob | None = None) -> None:
        """Tells Celery that a job has ended; with `held`, its message is acknowledged already."""
        is_error, value = completion.traced
        # The run time is the device's, without the tracer's own.
        runtime_s = completion.info["forward_ms"] / 1e3 if completion.info else 0.0
        error = raised(value) if is_error else None
        if error is not None:
            # Events tell of it by its repr: a pool of processes loses the wrapper on the way.
            value.exception = error
        completion.succeeded = error is None
        is_failure = error is not None and not isinstance(error, NOT_FAILURES)
        if is_failure or error is None:
            tell_readers(self._app.backend, completion.task_id, completion.call.message)

        def notify(result: Any) -> None:
            request = completion.call.request
            if held is not None and request is not None:
                held.lease.store.committed([held.lease.token])
                # Celery's own code runs next, and must not acknowledge again.
                request.acknowledged = True
            completion.call.callback(result)

        reason = type(error).__name__ if is_failure else None
        self._end(completion, notify, (is_error, value, runtime_s), reason)

    def _drop(self, completion: Completion) -> None:
        self._end(completion, lambda _: self._on_fenced(completion.call), None)

    def _end(
        self,
        completion: Completion,
        callback: Callable[[Any], None],
        result: Any,
        failure: str | None = None,
    ) -> None:
        """Ends a job on the pool's thread; `failure` is the class of its error, if it failed."""
        call = completion.call

        def end() -> None:
            try:
                callback(result)
            except Exception as error:
                if not is_away(error):
                    # The result is stored. Without this the job would stay here for ever.
                    _acknowledge(call)
                    raise
                # Celery's own code stores failures here. A lease of a living worker never ends by
                # itself, so the job must not stay with it.
                logger.warning("%s[%s] is given back: %r", call.task_name, call.task_id, error)
                _give_back(call)
            finally:
                completion.on_end(completion, failure)

        self._deliver(end)

    def _finisher(self) -> AtomicFinisher:
        if not hasattr(self._local, "finisher"):
            self._local.finisher = AtomicFinisher(for_completion(self._app.backend))
        finisher: AtomicFinisher = self._local.finisher
        return finisher


def _fail(call: TaskCall, plain: ExceptionInfo, info: ExceptionInfo) -> None:
    """Stores the failure of a job: `info`, or `plain` if that cannot be stored."""
    try:
        call.error_callback(info)
    except Exception as error:
        if is_away(error):
            raise
        logger.exception("%s[%s] cannot fail with its own error", call.task_name, call.task_id)
        call.error_callback(plain)


def _acknowledge(call: TaskCall) -> None:
    if call.request is not None:
        worker_state.task_ready(call.request)
        call.request.acknowledge()


def _give_back(call: TaskCall) -> None:
    # The call's current request: the message may have been delivered again while the result waited.
    if call.request is not None:
        give_back(call.request)
