"""Tasks whose hooks and receivers publish, change their request, or end their process."""

import os
import signal
import sys
import time
from typing import Any

from celery import Celery, signals
from redis import Redis

from batchery import BatchTask, install

URL = os.environ.get("CELERY_RESULT_BACKEND", "redis://127.0.0.1:1/0")

app = install(Celery("published", broker=URL, backend=URL, set_as_current=False))
app.conf.update(
    worker_hijack_root_logger=False,
    task_default_queue="published",
    task_protocol=int(os.environ.get("TASK_PROTOCOL", "2")),
)

#: Another app, whose queues are in another database.
elsewhere = Celery("elsewhere", broker=URL.removesuffix("/0") + "/1", set_as_current=False)

#: What `on_success` of a job with a mark finds on its request, in a list.
MARKS = "published:marks"
#: How often each job has begun, in a hash.
BEGUN = "published:begun"


class Publishing(BatchTask):
    """A task whose hooks publish."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        if args[0] == "exit":
            sys.exit("no more")
        vars(self.request)["mark"] = f"mark of {task_id}"

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        with Redis.from_url(URL) as redis:
            redis.rpush(MARKS, getattr(self.request, "mark", "none"))
        if retval == "elsewhere":
            elsewhere.send_task("ship", ("box",), queue="ships")
        if retval == "one id":
            for name in ("audit", "bill"):
                app.send_task(name, (retval,), queue="audits", task_id="shared")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        with app.connection_for_write() as connection, connection.Producer() as producer:
            for text in ("a letter", "another", "another"):
                producer.publish({"text": text}, exchange="", routing_key="letters")


def run(items: list[Any]) -> list[Any]:
    """Returns its items; fails, kills its process or takes too long where one says so."""
    with Redis.from_url(URL) as redis:
        for item in items:
            redis.hincrby(BEGUN, str(item), 1)
    if "fail" in items:
        raise LookupError("as it was told")
    if "die" in items:
        os.kill(os.getpid(), signal.SIGKILL)
    if {"last", "too slow"} & set(items):
        time.sleep(600)
    return items


def make(name: str, **options: Any) -> Any:
    """One of the tasks, which all do the same."""
    task: Any = app.task(base=Publishing, shared=False, name=name, max_batch_size=1, **options)
    return task(run)


publish = make("publish")
retry = make("retry", autoretry_for=(Exception,), max_retries=5, default_retry_delay=0)
limited = make("limited", time_limit=1, acks_on_failure_or_timeout=False)


@signals.task_prerun.connect(sender=publish)
def leave(args: Any, **_: Any) -> None:
    """Ends its process where the item says so."""
    if args[0] == "exit at once":
        sys.exit("at once")
