"""The result backend of a completion thread: a subclass of the one that the app chose.

Celery has no public way to add a field to a result, to store one by a script, or to wait for a
backend that is away. Each thread has a backend of its own, so a change of its class affects no
other.

What completes a job is tried again while Redis is away; after a deadline the job is given back.
Celery tries to store a result once, to publish a callback for half a second, and to join a chord
once. Then it stores a failure for a job that succeeded, or acknowledges a job whose caller waits
for ever.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any

import redis
from celery import Celery
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendError
from celery.states import FAILURE, STARTED
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from batchery.cluster_client import find_tag
from batchery.completion import current_completion
from batchery.protocol.headers import expiring_as_asked
from batchery.redis_scripts import RedisScripts
from batchery.retry import AWAY_ERRORS, REFUSALS, RetryDeadlineExceeded, is_away
from batchery_worker.commit.committer import result_scripts, store_states


class DeadlineRetry(Retry):
    """Retries of a Redis client: within a completion until its deadline, else the client's own."""

    def __init__(self, own: Retry | None) -> None:
        """Wraps the client's own retries; None if it has none."""
        super().__init__(NoBackoff(), 0, AWAY_ERRORS)
        self._own = own or Retry(NoBackoff(), 0)

    def call_with_retry(
        self, do: Callable[[], Any], fail: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Calls a command, and repeats it as long as the completion may wait."""
        completion, failures = current_completion(), 0
        if completion is None:
            return self._own.call_with_retry(do, fail, *args, **options)
        while True:
            try:
                return do()
            except Exception as error:
                if not is_away(error):
                    raise
                failures += 1
                fail(error, *([failures] if options.get("with_failure_count") else []))
                completion.deadline.wait(failures, error)


def publish_until_deadline(app: Celery) -> None:
    """Makes messages of completions wait while Redis is away: callbacks, chain steps, retries.

    Args:
        app: The app that sends them. A second call for the same app changes nothing.
    """
    messages: Any = app.amqp
    if not isinstance(messages.send_task_message, partial):
        messages.send_task_message = partial(_send, messages.send_task_message)


def _send(stock: Callable[..., Any], producer: Any, *args: Any, **options: Any) -> Any:
    completion, failures = current_completion(), 0
    if completion is None:
        return stock(producer, *args, **options)
    while True:
        connection = producer.connection
        try:
            return stock(producer, *args, **options)
        except (OperationalError, *connection.recoverable_connection_errors, *REFUSALS) as error:
            failures += 1
            completion.deadline.wait(failures, error)
            producer.revive(connection)


class BackendAway(RetryDeadlineExceeded):
    """A result backend took nothing, however often it was tried by its own settings."""

    def __init__(self, error: BaseException) -> None:
        BaseException.__init__(self, f"the result backend is away: {error}")


@contextmanager
def outage_told_apart(backend: Any) -> Iterator[None]:
    """Makes `BackendAway` of what a backend that is away raises, while a job is completed."""
    try:
        yield
    except Exception as error:
        if current_completion() is not None and _is_away(backend, error):
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
        with expiring_as_asked(self, request), outage_told_apart(self):
            return super().store_result(task_id, result, state, traceback, request, **options)

    def on_chord_part_return(self, *args: Any, **options: Any) -> None:
        """Counts a part of a chord, and sends the body after the last one."""
        with outage_told_apart(self):
            super().on_chord_part_return(*args, **options)


class CompletionRedisBackend(CompletionBackend):
    """Also stores results by a script, and lets all attempts of a job share a chord claim.

    Celery checks for a SUCCESS and writes in two steps. A retry is sent before the state RETRY is
    stored, so its SUCCESS may come between these steps and would be overwritten. The script also
    checks the job's lease, if that is on the same server.

    The attempt that completes the last part of a chord claims the chord for some seconds, and then
    publishes the body. Celery gives each attempt its own claim. If a worker dies after the claim,
    the job's next attempt respects that claim, and nobody publishes the body. Here all attempts of
    a job share one claim. Two attempts at the same time do no harm: messages have dedupe keys.
    """

    def _set_with_state(self, key: Any, value: bytes | str, state: str) -> None:
        completion = current_completion()
        bare = self.key_t(key).removeprefix(find_tag(self.key_t(key)))
        is_result = bare.startswith(self.task_keyprefix)
        if is_result and len(value) <= self._MAX_STR_VALUE_SIZE:
            expires_s = int((self.failure_expires if state == FAILURE else self.expires) or 0)
            lease = None if completion is None else completion.lease
            stored = store_states(self._result_scripts, {key: value}, expires_s, lease)
            if int(stored) != UNREADABLE:
                return
        # Celery's own decoders have read what is stored just now, and the script cannot.
        super()._set_with_state(key, value, state)

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


def _shared_claim(own: str) -> str:
    """What all attempts of the current job claim a chord by; outside of any, `own`."""
    completion = current_completion()
    return own if completion is None else completion.publish_tag or own


def _claim(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    """Counts a part of a chord. The last argument is the claim, the fourth answer who holds it."""
    claim = _shared_claim(args[-1])
    count, difference, size, claimed = stock(keys=keys, args=[*args[:-1], claim], client=client)
    if size and not claimed and count == int(size) + int(difference or 0):
        held = client.get(keys[-1])
        claimed = int(held in (claim, claim.encode()))
    return count, difference, size, claimed


def _extend(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    return stock(keys=keys, args=[_shared_claim(args[0]), *args[1:]], client=client)


def _clean_up(stock: Script, keys: Sequence[Any], args: Sequence[Any], client: Any) -> Any:
    completion = current_completion()
    if completion is not None and completion.deadline.is_exceeded:
        # The body was not published, so the job's next attempt needs these keys.
        return 1
    return _extend(stock, keys, args, client)
