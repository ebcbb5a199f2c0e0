"""The same app on Batchery and on Celery as it is, with everything that can listen to a job.

What listens writes down what it is told, and what it sees, so that the two can be compared.
"""

import json
import os
import time
from typing import Any

import celery
from celery import Celery, Task, current_task, signals
from redis import Redis

from batchery import BatchTask, install
from support.patience import patient

#: In the names of what is written down.
OWN = os.environ.get("LISTENED_AS", "batchery")
STOCK = OWN == "stock"
URL = os.environ.get("CELERY_RESULT_BACKEND", "redis://127.0.0.1:1/0")

app = Celery("listened", broker=URL, backend=URL, set_as_current=False)
app.conf.worker_hijack_root_logger = False
if not STOCK:
    install(app)

#: Redis lists: of what a job's listeners were told, and of what Sentry was sent.
TRACE = "listened:trace:{}:{}"
SENT = "listened:sentry:{}"
#: A Redis key: the slow hook waits until it is there.
GATE = "listened:gate"

if os.environ.get("LISTENED_SENTRY"):
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class ToRedis(Transport):
        """Writes down what would go to Sentry."""

        def capture_envelope(self, envelope: Any) -> None:
            """Writes down one envelope."""
            for item in envelope.items:
                payload = json.loads(item.get_bytes())
                note(SENT.format(OWN), {"type": item.type, "payload": payload})

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=ToRedis,
        traces_sample_rate=float(os.environ["LISTENED_SENTRY"]) or None,
    )


def note(key: str, info: Any) -> None:
    """Appends one line to a list in Redis."""
    with Redis.from_url(URL) as redis:
        redis.rpush(key, json.dumps(info, default=repr))


def heard(kind: str, task_id: str, **info: Any) -> None:
    """Writes down one call of a listener, with what it sees of its job."""
    task: Any = current_task
    seen = dict(vars(task.request)) if task else {}
    note(TRACE.format(OWN, task_id), {"kind": kind, **info, "request": seen})


def await_gate() -> None:
    """Waits, but not for ever."""
    deadline_s = time.monotonic() + patient(60)
    with Redis.from_url(URL) as redis:
        while not redis.exists(GATE) and time.monotonic() < deadline_s:
            time.sleep(0.02)


class Hooks(Task):  # type: ignore[type-arg]
    """Every hook of Celery's tasks."""

    abstract = True

    def before_start(self, task_id: Any, args: Any, kwargs: Any) -> None:
        heard("before_start", task_id, args=args, kwargs=kwargs)
        if args == ["refuse"]:
            raise LookupError("refused")

    def on_success(self, retval: Any, task_id: Any, args: Any, kwargs: Any) -> None:
        heard("on_success", task_id, retval=retval, args=args, kwargs=kwargs)
        if args == ["break"]:
            raise LookupError("a broken hook")
        if args == ["slow"]:
            await_gate()

    def on_failure(self, exc: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any) -> None:
        heard("on_failure", task_id, exc=exc, args=args, kwargs=kwargs, einfo=repr(einfo))

    def on_retry(self, exc: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any) -> None:
        heard("on_retry", task_id, exc=exc, args=args, kwargs=kwargs, einfo=repr(einfo))

    def after_return(
        self, status: Any, retval: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        heard("after_return", task_id, status=status, retval=retval, args=args, kwargs=kwargs)


def work(task: Any, word: str, mark: str) -> Any:
    """What the task is for."""
    if word == "fail":
        raise LookupError(f"asked to {word}")
    if word == "again":
        # Long enough for what listens to the first attempt.
        raise task.retry(countdown=patient(1.0), exc=KeyError(word))
    if word == "nap":
        time.sleep(0.2)
    return word.upper() + mark


def retried_once(task: Any, word: str, mark: str) -> Any:
    """As `work`; writes down when it runs."""
    note(TRACE.format(OWN, mark), {"kind": "run", "word": word})
    return work(task, word, mark)


HOOKED = "listened.hooked"
PLAIN = "listened.plain"

if STOCK:

    @app.task(shared=False, base=Hooks, bind=True, name=HOOKED, max_retries=1, acks_late=True)
    def hooked(self: Any, word: str, mark: str = "") -> Any:
        return retried_once(self, word, mark)

    @app.task(shared=False, bind=True, name=PLAIN, acks_late=True)
    def plain(self: Any, word: str, mark: str = "") -> Any:
        return work(self, word, mark)

else:

    class HookedBatch(Hooks, BatchTask):
        """The same hooks on a batch task."""

        abstract = True

    @app.task(shared=False, base=HookedBatch, bind=True, name=HOOKED, max_retries=1)
    def hooked(self: Any, words: list[str], mark: str = "") -> Any:
        return [retried_once(self, word, mark) for word in words]

    @app.task(shared=False, base=BatchTask, bind=True, name=PLAIN, max_batch_size=64)
    def plain(self: Any, words: list[str], mark: str = "") -> Any:
        values = []
        for word in words:
            values.append(work(self, word, mark))  # noqa: PERF401 - its frame is the function's
        return values


def _receiver(name: str) -> Any:
    def receive(sender: Any = None, **named: Any) -> None:
        if getattr(sender, "name", None) != HOOKED:
            return
        named.pop("signal")
        request = named.pop("request", None)
        task_id = named.pop("task_id", None) or (request or sender.request).id
        heard(name, task_id, **{key: _plain(value) for key, value in named.items()})

    getattr(signals, name).connect(receive, weak=False)
    return receive


def _plain(value: Any) -> Any:
    """What can be compared of an argument."""
    if isinstance(value, float):
        return "a float"
    if type(value).__name__ in ("ExceptionInfo", "traceback"):
        return type(value).__name__
    if isinstance(value, celery.Task):
        return f"task {value.name}"
    return value


if "LISTENED_SENTRY" in os.environ:
    # Only in a worker: tests that import this module have other tests in their process.
    for _name in ("task_prerun", "task_postrun", "task_success", "task_failure", "task_retry"):
        _receiver(_name)
