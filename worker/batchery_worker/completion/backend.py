"""The result backend of a completion thread: a subclass of the one that the app chose.

Celery has no public way to add a field to a result, to hold a result back, or to wait for a backend
that is away. Each thread has a backend of its own, so a change of its class affects no other.

What completes a job is tried again while Redis is away; after a deadline the job is given back.
Celery tries to store a result once, to publish a callback for half a second, and to join a chord
once. Then it stores a failure for a job that succeeded, or acknowledges a job whose caller waits
for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, partial
from typing import Any

import redis
from celery import Celery
from celery._state import get_current_task
from celery.app import amqp
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendError
from celery.states import FAILURE, PENDING, STARTED, SUCCESS
from kombu.exceptions import OperationalError
from redis.backoff import AbstractBackoff, NoBackoff
from redis.retry import Retry

from batchery.completion import JobCompletion, Outbox, completing, current_completion
from batchery.protocol.headers import expiring_as_asked
from batchery.redis_scripts import RedisScripts, ScriptCall
from batchery.retry import (
    AWAY_ERRORS,
    REFUSALS,
    RetryDeadline,
    RetryDeadlineExceeded,
    is_away,
)
from batchery_worker.commit.committer import result_scripts

#: Celery's variable that is set while its tracer publishes callbacks and the next step of a chain.
_follows_a_job: ContextVar[bool] = getattr(
    amqp, "_callback_publish_retry", ContextVar("batchery_unknown", default=False)
)


class _DeadlineBackoff(AbstractBackoff):
    """The pauses between attempts of one command; redis-py asks for them here."""

    def compute(self, failures: int) -> float:
        if completion := current_completion():
            completion.deadline.wait(failures, "no answer to a command")
        return 0.0


class DeadlineRetry(Retry):
    """Retries of a Redis client: within a completion until its deadline, else the client's own."""

    def __init__(self, own: Retry | None) -> None:
        """Wraps the client's own retries; None if it has none."""
        super().__init__(_DeadlineBackoff(), -1, AWAY_ERRORS)
        self._own = own or Retry(NoBackoff(), 0)

    def call_with_retry(self, do: Callable[[], Any], *args: Any, **options: Any) -> Any:
        """Calls a command, and repeats it as long as the completion may wait."""
        if current_completion() is None:
            return self._own.call_with_retry(do, *args, **options)
        return super().call_with_retry(partial(_recognise_refusal, do), *args, **options)


def _recognise_refusal(do: Callable[[], Any]) -> Any:
    """Calls a command of which Redis 6.2 does not say clearly that there is no room to write."""
    try:
        return do()
    except redis.ResponseError as error:
        if is_away(error) and not isinstance(error, AWAY_ERRORS):
            raise redis.OutOfMemoryError(*error.args) from error
        raise


def publish_until_deadline(app: Celery) -> None:
    """Makes messages of completions wait while Redis is away: callbacks, chain steps, retries.

    Args:
        app: The app that sends them. A second call for the same app changes nothing.
    """
    messages: Any = app.amqp
    if not isinstance(messages.send_task_message, partial):
        messages.send_task_message = partial(_send, messages.send_task_message)


def _send(stock: Callable[..., Any], producer: Any, *args: Any, **options: Any) -> Any:
    completion = current_completion()
    if completion is None and not _follows_a_job.get():
        return stock(producer, *args, **options)
    deadline = RetryDeadline() if completion is None else completion.deadline
    failures = 0
    while True:
        connection = producer.connection
        try:
            return stock(producer, *args, **options)
        except (OperationalError, *connection.recoverable_connection_errors, *REFUSALS) as error:
            failures += 1
            try:
                deadline.wait(failures, error)
            except RetryDeadlineExceeded:
                if _may_come_again():
                    raise
                raise error from None
            producer.revive(connection)


def _may_come_again() -> bool:
    """Whether the message of this thread's job is not acknowledged yet."""
    late = bool(getattr(get_current_task(), "acks_late", False))
    return current_completion() is not None or late


class BackendAway(RetryDeadlineExceeded):
    """A result backend took nothing, however often it was tried by its own settings."""

    def __init__(self, error: BaseException) -> None:
        BaseException.__init__(self, f"the result backend is away: {error}")


@contextmanager
def outage_told_apart(backend: Any) -> Iterator[None]:
    """Makes `BackendAway` of what a backend that is away raises; for the backend's own calls alone.

    Code of users, such as a hook, may raise the same errors, and no job runs again for these.
    """
    try:
        yield
    except Exception as error:
        if _is_away(backend, error):
            raise BackendAway(error) from error
        raise


def _is_away(backend: Any, error: Exception) -> bool:
    """Whether an error means that a backend takes no results for now; False if it refused one."""
    # Celery wraps what it has tried for long enough.
    cause = error.__cause__ if isinstance(error, BackendError) else error
    # A KeyError is among Celery's connection errors, and comes of malformed messages, too.
    return (
        isinstance(cause, Exception)
        and not isinstance(cause, KeyError)
        and bool(backend.exception_safe_to_retry(cause))
    )


_Backend: Any = object

#: How often a result is tried again. Celery's pauses grow to ten seconds, five on average. All
#: together they take about half a minute, which a shutdown may have to wait.
STORE_RETRIES = 15

#: Answer of store.lua if it cannot read the result that is stored already.
UNREADABLE = 2

#: Celery's answer for a part of a chord whose body it has sent already; then it does nothing more.
IS_OVER = (-1, 0, 0, 0)

#: One of Celery's Lua scripts.
Script = Callable[..., Any]


class CompletionBackend(_Backend):  # type: ignore[misc]
    """Stores results with the facts of their batch, and waits while the backend is away."""

    #: The class of the backend that the app chose.
    stock_class: type

    @property
    def always_retry(self) -> bool:
        """Whether calls are tried again: those of a completion; others if the app wants it."""
        return bool(vars(self)["always_retry"]) or current_completion() is not None

    def _get_result_meta(self, *args: Any, **keywords: Any) -> dict[str, Any]:
        meta: dict[str, Any] = super()._get_result_meta(*args, **keywords)
        completion = current_completion()
        if completion is not None and completion.info is not None:
            meta["batch"] = dict(completion.info)
        return meta

    def store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        **options: Any,
    ) -> Any:
        """Stores a state, but not STARTED for a batch job: its device has stored that."""
        completion = current_completion()
        if state == STARTED and completion is not None and completion.task_id == task_id:
            return result
        with expiring_as_asked(self, request):
            return super().store_result(task_id, result, state, traceback, request, **options)

    def on_chord_part_return(self, *args: Any, **options: Any) -> None:
        """Counts a part of a chord, and sends the body after the last one."""
        with outage_told_apart(self):
            super().on_chord_part_return(*args, **options)

    def mark_as_done(self, *args: Any, **options: Any) -> Any:
        """Stores a result, publishes what follows the job, and counts it in a chord."""
        with _with_deadline(self):
            return super().mark_as_done(*args, **options)

    def mark_as_failure(self, *args: Any, **options: Any) -> Any:
        """Stores a failure, and notifies those who wait for it."""
        with _with_deadline(self):
            return super().mark_as_failure(*args, **options)

    def mark_as_retry(self, *args: Any, **options: Any) -> Any:
        """Stores that a job will run again."""
        with _with_deadline(self):
            return super().mark_as_retry(*args, **options)


class CompletionRedisBackend(CompletionBackend):
    """Also holds results back for the outbox, and lets all attempts of a job share a chord claim.

    A result that is not held back is written by a script, which first checks for a SUCCESS. Celery
    checks and writes in two steps. A retry is sent before the state RETRY is stored, so its SUCCESS
    may come between these steps and would be overwritten.

    The attempt that completes the last part of a chord claims the chord for some seconds, and then
    publishes the body. Celery gives each attempt its own claim. If a worker dies after the claim,
    the job's next attempt respects that claim, and nobody publishes the body. Here all attempts of
    a job share one claim. Two attempts at the same time do no harm: messages have dedupe keys.
    """

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Whether an error passes: a completion also waits for a Redis that takes no writes."""
        waits = current_completion() is not None and not vars(self)["always_retry"]
        return bool(super().exception_safe_to_retry(exc)) or (waits and isinstance(exc, REFUSALS))

    def _get_task_meta_for(self, task_id: str) -> Any:
        outbox = _outbox()
        if outbox is not None and outbox.holds_result(task_id):
            # Celery asks whether a SUCCESS is stored. The script that writes at the end checks it.
            return {"status": PENDING}
        return super()._get_task_meta_for(task_id)

    def _set_with_state(self, key: Any, value: bytes | str, state: str) -> None:
        outbox = _outbox()
        fits = len(value) <= self._MAX_STR_VALUE_SIZE
        expires_s = int((self.failure_expires if state == FAILURE else self.expires) or 0)
        write = partial(self._write, key, value, state, expires_s)
        if outbox and outbox.holds and fits and key == self.get_key_for_task(outbox.task_id):
            outbox.hold_result(value, expires_s, write)
        else:
            write()

    def _write(self, key: Any, value: bytes | str, state: str, expires_s: int) -> None:
        is_result = self.key_t(key).startswith(self.task_keyprefix)
        if not is_result or len(value) > self._MAX_STR_VALUE_SIZE:
            super()._set_with_state(key, value, state)
            return
        stored = self._result_scripts.run("store", [key], expires_s, value)
        # The script reads only JSON. Celery's decoders can read results of other serializers.
        if int(stored) == UNREADABLE and (
            super()._get_task_meta_for(self._strip_prefix(key))["status"] != SUCCESS
        ):
            super()._set_with_state(key, value, state)

    def on_chord_part_return(self, *args: Any, **options: Any) -> None:
        """Counts a part of a chord, and sends the body after the last one."""
        count = partial(super().on_chord_part_return, *args, **options)
        outbox = _outbox()
        if outbox is not None and outbox.holds:
            outbox.hold_part(count)
        # Where it is held back, Celery's script only notes its call.
        count()

    def count_parts(self, calls: Sequence[ScriptCall]) -> list[bool]:
        """Counts parts of chords in one round trip.

        Returns:
            Whether each is done with. Else Celery must count it once more, which changes nothing:
            it was the last part, or was refused.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        script = super()._chord_part_return_script
        with self.client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                script(keys=keys, args=args, client=pipe)
            return [_is_counted(answer) for answer in pipe.execute(raise_on_error=False)]

    @cached_property
    def _result_scripts(self) -> RedisScripts:
        return result_scripts(self.client)

    # Celery's chord scripts. They are properties, which outrank scripts in the instance's dict.

    @property
    def _chord_part_return_script(self) -> Script:
        return partial(_claim, super()._chord_part_return_script)

    @property
    def _chord_claim_extend_script(self) -> Script:
        return partial(_extend, super()._chord_claim_extend_script)

    @property
    def _chord_cleanup_script(self) -> Script:
        return partial(_clean_up, super()._chord_cleanup_script)


def for_completion(backend: Any) -> Any:
    """Turns a backend into one that completes jobs, unless it is one; returns it.

    Args:
        backend: A Celery result backend of any kind, of a thread that may wait.
    """
    if isinstance(backend, CompletionBackend):
        return backend
    stock: Any = type(backend)
    backend.__class__ = _completion_class(stock)
    if not vars(backend)["always_retry"]:
        # An app that sets `always_retry` keeps its own settings for retries.
        backend.max_retries = STORE_RETRIES
        if isinstance(backend, RedisBackend):
            client: redis.Redis = backend.client
            client.set_retry(DeadlineRetry(client.get_retry()))
    return backend


@cache
def _completion_class(stock: Any) -> type:
    ours = CompletionRedisBackend if issubclass(stock, RedisBackend) else CompletionBackend
    return type(stock.__name__, (ours, stock), {"__module__": __name__, "stock_class": stock})


def _outbox() -> Outbox | None:
    completion = current_completion()
    return None if completion is None else completion.outbox


@contextmanager
def _with_deadline(backend: Any) -> Iterator[None]:
    """Gives the completion of an ordinary job a deadline; its function must not have one."""
    if current_completion() is not None:
        with _errors_told_apart(backend):
            yield
        return
    try:
        with completing(JobCompletion()), _errors_told_apart(backend):
            yield
    except RetryDeadlineExceeded as error:
        if _may_come_again():
            raise
        # Nobody can give it back, so it fails as in Celery.
        raise BackendError(str(error)) from error


@contextmanager
def _errors_told_apart(backend: Any) -> Iterator[None]:
    try:
        yield
    except BackendError:
        # Of the errors of a backend only these have a class of their own.
        with outage_told_apart(backend):
            raise


def _publish_tag() -> str | None:
    completion = current_completion()
    return None if completion is None else completion.publish_tag


def _claim(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    """Counts a part of a chord. The last argument is the claim, the fourth answer who holds it."""
    tag, outbox = _publish_tag(), _outbox()
    if tag is None:
        return stock(keys=keys, args=args, client=client)
    args = [*args[:-1], tag]
    if outbox is not None and outbox.holds:
        outbox.part_calls.append((keys, args))
        return IS_OVER
    count, difference, size, claimed = stock(keys=keys, args=args, client=client)
    if size and not claimed and count == int(size) + int(difference or 0):
        held = client.get(keys[-1])
        claimed = int(held in (tag, tag.encode()))
    return count, difference, size, claimed


def _is_counted(answer: Any) -> bool:
    """Whether Celery would do nothing more after this answer of its script."""
    if isinstance(answer, Exception):
        return False
    count, difference, size, _ = answer
    return bool(count == IS_OVER[0] or not size or count != int(size) + int(difference or 0))


def _extend(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    return stock(keys=keys, args=[_publish_tag() or args[0], *args[1:]], client=client)


def _clean_up(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    completion = current_completion()
    if completion is not None and completion.deadline.is_exceeded:
        # The body was not published, so the job's next attempt needs these keys.
        return 1
    return stock(keys=keys, args=[_publish_tag() or args[0], *args[1:]], client=client)
