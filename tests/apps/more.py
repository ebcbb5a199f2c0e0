"""An app that writes down what Celery tells it: hooks, signals, the ticks of beat."""

import json
import os
import time
from typing import Any

from celery import Celery, Task, signals
from kombu.serialization import register as register_serializer
from redis import Redis

from batchery import BatchTask, Failed, install
from support.patience import patient

app = install(Celery("more", set_as_current=False))
# A slow machine may hold up a worker that lives for as long as the default.
app.conf.broker_transport_options = {"lease_expiry_s": patient(5)}
app.conf.update(
    worker_hijack_root_logger=False,
    worker_direct=True,
    result_extended=True,
    # A serializer of the app's own: results are longer by a mark that nothing else writes.
    result_serializer="marked",
    result_accept_content=["marked", "json"],
    accept_content=["json", "marked"],
    beat_schedule={"tick": {"task": "apps.more.ticking", "schedule": 0.5, "args": ("tick",)}},
)

MARK = "marked:"

#: A Redis list: what was seen, one JSON object each.
TRACE = "trace"


def _dump(value: Any) -> str:
    return MARK + json.dumps(value)


def _load(text: Any) -> Any:
    return json.loads((text if isinstance(text, str) else text.decode()).removeprefix(MARK))


register_serializer("marked", _dump, _load, "application/x-marked", "utf-8")


def note(kind: str, job_id: Any, **info: Any) -> None:
    """Appends one line to the trace."""
    with Redis.from_url(str(app.conf.broker_url)) as redis:
        redis.rpush(TRACE, json.dumps({"kind": kind, "id": job_id, **info}))


class ApiError(Exception):
    """Cannot be made again from its args."""

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        super().__init__(f"{status}: {body}")


class Soft(Exception):
    status = 0


def soft() -> Soft:
    error = Soft("down")
    error.status = 503
    return error


class Hooked(BatchTask):
    """Hooks of Celery's tasks, written down."""

    abstract = True

    def before_start(self, task_id: Any, args: Any, kwargs: Any) -> None:
        note("before_start", task_id, args=args, kwargs=kwargs)

    def on_success(self, retval: Any, task_id: Any, args: Any, kwargs: Any) -> None:
        request: Any = self.request
        info = {"id": request.id, "retries": request.retries, "args": list(request.args)}
        note("on_success", task_id, value=retval, args=args, kwargs=kwargs, request=info)

    def on_failure(self, exc: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any) -> None:
        info = {"error": repr(exc), "status": getattr(exc, "status", None)}
        note("on_failure", task_id, args=args, trace=str(einfo.traceback), **info)

    def after_return(
        self, status: Any, retval: Any, task_id: Any, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        note("after_return", task_id, status=status)


@app.task(shared=False, base=Hooked, bind=True, max_retries=1, max_batch_size=64)
def hooked(self: Hooked, words: list[str], *, mark: str = "") -> list[Any]:
    """Does what each word says."""
    outcomes = {
        "fail": Failed(LookupError("asked to")),
        "soft": Failed(soft()),
    }
    return [outcomes.get(word, word + mark) for word in words]


@signals.task_received.connect
def _received(request: Any = None, **_: Any) -> None:
    if request.name == hooked.name:
        note("task_received", request.id)


@signals.task_prerun.connect(sender=hooked)
def _prerun(task_id: Any = None, args: Any = None, kwargs: Any = None, **_: Any) -> None:
    note("task_prerun", task_id, args=args, kwargs=kwargs)


@signals.task_postrun.connect(sender=hooked)
def _postrun(task_id: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
    note("task_postrun", task_id, state=state, value=repr(retval))


@signals.task_success.connect(sender=hooked)
def _success(sender: Any = None, result: Any = None, **_: Any) -> None:
    note("task_success", sender.request.id, value=result)


@signals.task_revoked.connect(sender=hooked)
def _revoked(request: Any = None, terminated: Any = None, expired: Any = None, **_: Any) -> None:
    note("task_revoked", request.id, terminated=terminated, expired=expired)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def echo(items: list[Any], *, tag: str = "") -> list[Any]:
    return items


@app.task(shared=False, base=BatchTask, max_batch_size=2, max_wait_ms=600_000)
def pair(items: list[str]) -> list[str]:
    """One job waits for a second."""
    return items


@app.task(shared=False, base=BatchTask, max_batch_size=1)
def one_by_one(items: list[str]) -> list[str]:
    note("one_by_one", None, items=items)
    return items


@app.task(shared=False, base=BatchTask, ignore_result=True, store_errors_even_if_ignored=True)
def silent(items: list[str]) -> list[Any]:
    if "raise" in items:
        raise LookupError("asked to")
    return [Failed("asked to") if item == "fail" else item for item in items]


@app.task(
    shared=False,
    base=BatchTask,
    autoretry_for=(ConnectionError,),
    retry_backoff=1,
    retry_jitter=False,
    max_retries=1,
)
def backing_off(items: list[str]) -> list[Any]:
    return [Failed(ConnectionError("still away")) for _ in items]


@app.task(
    shared=False,
    base=Hooked,
    autoretry_for=(ApiError,),
    retry_kwargs={"countdown": 0.01},
    max_retries=2,
)
def calling(items: list[str]) -> list[Any]:
    note("calling", None)
    raise ApiError(503, items[0])


@app.task(shared=False, base=BatchTask, throws=(LookupError,))
def throwing(items: list[str]) -> list[Any]:
    return [Failed(LookupError(item)) for item in items]


@app.task(shared=False, base=BatchTask, rate_limit="4/s")
def limited(items: list[int]) -> list[int]:
    return items


@app.task(shared=False, base=BatchTask)
def nap(seconds: list[float]) -> list[float]:
    """A forward pass that takes its time, and may be cut short by a soft limit."""
    for each in seconds:
        time.sleep(each)
    return seconds


@app.task(shared=False, base=BatchTask)
def until(paths: list[str]) -> list[str]:
    """Computes until there are files of these names."""
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
    return paths


@app.task(shared=False, base=BatchTask)
def ticking(items: list[str]) -> list[str]:
    note("tick", None, items=items)
    return items


class Called(Task):  # type: ignore[type-arg]
    """Has a `__call__` of its own."""

    abstract = True

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        note("called", self.request.id, pid=os.getpid())
        return super().__call__(*args, **keywords)


class CalledBatch(Called, BatchTask):
    """A batch task, and that `__call__` comes first."""

    abstract = True


@app.task(shared=False, base=CalledBatch, max_batch_size=8, max_wait_ms=200)
def called(items: list[str]) -> list[int]:
    note("ran", None)
    return [os.getpid()] * len(items)
