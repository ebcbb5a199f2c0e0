"""An app whose functions look at their jobs, and jobs that become others."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import Celery, chord, group, signals
from redis import Redis

from batchery import BatchTask, Failed, Replace, RetryAfter, install

app = Celery("canvas", set_as_current=False)
if os.environ.get("INSTALL", "1") == "1":
    install(app)
app.conf.update(
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    # So that what a worker sends comes back to it.
    task_default_queue=os.environ.get("DEFAULT_QUEUE", "celery"),
)

#: A Redis list: every item that was executed, with the worker that did it.
EXECUTED = "executed"

#: A Redis set: pids of processes that were told to prepare themselves.
PREPARED = "prepared"


#: What is executed in a device has the worker as its parent.
IS_DEVICE = Path(sys.argv[0]).parent.name == "device"


def redis() -> Redis:
    return Redis.from_url(str(app.conf.broker_url))


def note(items: list[Any]) -> None:
    worker = os.getppid() if IS_DEVICE else os.getpid()
    with redis() as client:
        client.rpush(EXECUTED, *(json.dumps([item, worker]) for item in items))


def executions(client: Redis) -> list[tuple[Any, int]]:
    """What was executed, in order, and the pid of the worker that did it."""
    return [tuple(json.loads(line)) for line in client.lrange(EXECUTED, 0, -1)]


@signals.worker_process_init.connect
def prepare(**_: Any) -> None:
    """What an app does once in each process that runs its tasks."""
    with redis() as client:
        client.sadd(PREPARED, os.getpid())


def info(job: Any) -> dict[str, Any]:
    """What a function sees of a job."""
    return {
        "id": job.id,
        "retries": job.retries,
        "headers": job.headers,
        "priority": (job.delivery_info or {}).get("priority"),
        "routing_key": (job.delivery_info or {}).get("routing_key"),
        "root_id": job.root_id,
        "parent_id": job.parent_id,
        "group": job.group,
        "correlation_id": job.correlation_id,
        "args": job.args,
        "kwargs": job.kwargs,
    }


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64, max_retries=3)
def look(self: BatchTask, items: list[Any], *, tag: str = "") -> list[Any]:
    """Says of each item what is known of its job; what asks for it comes twice."""
    outcomes: list[Any] = []
    for item, job in zip(items, self.request.per_item, strict=True):
        if item == "again" and job.retries < 2:
            outcomes.append(RetryAfter(0))
        elif item == "bad":
            raise LookupError("a bad one")
        else:
            jobs = [[each.id, list(each.items)] for each in self.request.jobs]
            outcomes.append({"item": item, "jobs": jobs, **info(job)})
    return outcomes


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64)
def ask(self: BatchTask, names: list[str]) -> list[Any]:
    """Asks the request of the whole batch for an attribute."""
    return [str(getattr(self.request, name)) for name in names]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def unbound(items: list[Any]) -> list[Any]:
    return [[job.id for job in unbound.request.jobs]] * len(items)


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64, default_retry_delay=0)
def stock_calls(self: BatchTask, items: list[str]) -> list[Any]:
    """As one would write it for Celery's own tasks."""
    for item, job in zip(items, self.request.per_item, strict=True):
        if item == "retry" and job.retries < 2:
            self.retry(exc=ConnectionError("not yet"))
        if item == "replace":
            raise self.replace(shout.s("replaced"))
        if item == "too much":
            self.retry(queue="elsewhere")
    return [f"{item} {job.retries}" for item, job in zip(items, self.request.per_item, strict=True)]


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64)
def progress(self: BatchTask, items: list[str]) -> list[str]:
    """Tells of each job how far it is, and waits until that was seen."""
    for item, job in zip(items, self.request.per_item, strict=True):
        self.update_state(task_id=job.id, state="PROGRESS", meta={"item": item})
    with redis() as client:
        while client.exists(*items) != len(items):
            time.sleep(0.02)
    return items


@app.task(shared=False, base=BatchTask, max_batch_size=64, track_started=True)
def tracked(items: list[str]) -> list[str]:
    with redis() as client:
        while client.exists(*items) != len(items):
            time.sleep(0.02)
    return items


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def total(lists: list[list[int]]) -> list[int]:
    note([f"total of {each}" for each in lists])
    return [sum(each) for each in lists]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def increment(numbers: list[int]) -> list[int]:
    return [number + 1 for number in numbers]


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number


@app.task(shared=False, bind=True)
def own_request(self: Any) -> dict[str, Any]:
    return info(self.request)


def call_others() -> list[Any]:
    """What tasks answer that are called eagerly, and directly."""
    seen: Any = own_request.apply(task_id="eager").result
    answers = [double.apply((21,)).result, shout.apply(("a",)).result, double(21), double.run(21)]
    return [*answers, own_request.run()["id"], seen["id"], seen["root_id"], seen["parent_id"]]


@app.task(shared=False, bind=True)
def calls_of_a_task(self: Any) -> list[Any]:
    return [self.request.id, *call_others()]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def calls_of_unbound(items: list[str]) -> list[Any]:
    return [[len(items), *call_others()] for _ in items]


@app.task(shared=False, base=BatchTask, bind=True, max_batch_size=64)
def calls_of_bound(self: BatchTask, items: list[str]) -> list[Any]:
    ids = [job.id for job in self.request.per_item]
    return [[ids, *call_others()] for _ in items]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def become(wishes: list[str], *, number: int = 1) -> list[Any]:
    """Each job becomes what it wishes."""
    s = increment.s
    made: dict[str, Callable[[], Any]] = {
        "task": lambda: s(number),
        "ordinary": lambda: double.s(number),
        "chain": lambda: s(number) | double.s() | s(),
        "group": lambda: group(s(number), double.s(number)),
        "chord": lambda: chord([s(number), s(number)], total.s()),
        "itself": lambda: become.s("task", number=number),
        "failure": lambda: fail.s("replaced"),
        "nothing": lambda: "no signature",
        "unsendable": lambda: increment.s(object()),
    }
    return [number if wish == "stay" else Replace(made[wish]()) for wish in wishes]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def fail(items: list[str]) -> list[Any]:
    return [Failed(LookupError(item)) for item in items]


@app.task(shared=False)
def callback(*args: Any) -> None:
    """Of `link` with a result, or of `link_error` with a request, an error and a traceback."""
    note([f"callback {getattr(args[0], 'id', args[0])}"])
