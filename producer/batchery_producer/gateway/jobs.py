"""The gateway's own jobs as tasks, and the worker that runs them.

An ordinary worker: `batchery serve` starts one beside itself, and others may run elsewhere as

    celery -A batchery.app worker -I batchery_producer.gateway.jobs -Q batchery.gateway

Each such worker tidies now and then, one of them at a time.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import redis
from celery import Celery, shared_task
from celery.exceptions import Reject
from celery.signals import worker_ready
from kombu.exceptions import OperationalError

from batchery.cli.main import one_line_errors
from batchery.errors import BatcheryError, SettingsError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.log_pace import LogPace
from batchery.settings import Settings
from batchery_producer.gateway.batches.run import BatchRun
from batchery_producer.gateway.batches.shared import Shared
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import BATCH, TaskRecord
from batchery_producer.gateway.webhooks import BUSY_S, PAUSES_S, Busy, Undeliverable, post_result
from batchery_producer.gateway.webhooks import TASK as WEBHOOK

logger = logging.getLogger(__name__)

#: How often a worker looks for what was lost or has expired, in seconds.
TIDY_S = 5.0

#: How long after a failure a job is tried again, in seconds.
RETRY_S = 5.0

#: Jobs that the worker beside a gateway runs at once; most of them wait.
SLOTS = 16

#: After how long a worker that has ended is started again, in seconds.
RESTART_S = 5.0

#: Options of all tasks: a job whose worker died runs again.
OPTIONS: dict[str, Any] = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "ignore_result": True,
    "max_retries": None,
}


def app_settings(app: Celery) -> Settings:
    """The settings of an app; those of the environment and the file if `install` was not called."""
    try:
        return get_installation(app).settings
    except SettingsError:
        return Settings.load(app.conf)


@cache
def get_context(app: Celery) -> Shared:
    """What the jobs of this process share."""
    return Shared(app, app_settings(app))


@shared_task(bind=True, name=BATCH, **OPTIONS)
def run_batch(self: Any, batch_id: str) -> None:
    """Goes on with a batch; runs again until that is over."""
    context = get_context(self.app)
    pause_s: float | None = None
    try:
        with context.batches.attempt(batch_id) as is_alone:
            record = context.batches.load(batch_id) if is_alone else None
            if record is not None:
                pause_s = BatchRun(context, record).run()
    except (BatcheryError, Problem, redis.RedisError, OperationalError) as error:
        logger.warning("batch %s: tried again soon: %s", batch_id, error)
        pause_s = RETRY_S
    if pause_s is not None:
        run_again(self, pause_s)


@shared_task(bind=True, name=WEBHOOK, **OPTIONS)
def post_webhook(self: Any, url: str, task: dict[str, Any], attempts: int = 0) -> None:
    """Makes one attempt to post the result of a task."""
    context, where = get_context(self.app), f"webhook of task {task['id']} to {url}"
    try:
        post_result(context.store, context.settings.gateway, url, TaskRecord(**task))
    except Busy:
        run_again(self, BUSY_S)
    except Problem as problem:
        logger.warning("%s: tried again soon: %s", where, problem)
        run_again(self, RETRY_S)
    except Undeliverable as error:
        if error.is_final or attempts >= len(PAUSES_S):
            logger.error("%s is given up: %s", where, error)
            return
        logger.warning("%s failed, again in %g s: %s", where, PAUSES_S[attempts], error)
        run_again(self, PAUSES_S[attempts], args=[url, task, attempts + 1])


def run_again(task: Any, pause_s: float, **changes: Any) -> None:
    """Ends a task, and has it run again in so many seconds.

    Raises:
        Retry: Celery's.
        Reject: So is this; the broker is away, so the message goes back as it is.
    """
    try:
        task.retry(countdown=pause_s, **changes)
    except Reject as reject:
        time.sleep(RETRY_S)
        raise Reject("the broker is away", requeue=True) from reject


# What happens by itself


@worker_ready.connect
def begin_to_tidy(sender: Any, **_: Any) -> None:
    """Tidies now and then, if the worker has the queue."""
    if JOBS_QUEUE in sender.app.amqp.queues.consume_from:
        threading.Thread(target=_tidy_on, args=(sender.app,), daemon=True).start()


def _tidy_on(app: Celery) -> None:
    pace = LogPace()
    while True:
        time.sleep(TIDY_S)
        try:
            tidy(get_context(app))
        except Exception as error:  # noqa: BLE001 - Redis may be away, and come back
            if pace.is_due(str(error)):
                logger.warning("jobs of the gateway: cannot be looked for: %s", error)


def tidy(context: Shared) -> None:
    """Takes up batches whose messages were lost, and removes files that have expired.

    Raises:
        Problem: Redis is away.
        OperationalError: So is the broker.
    """
    store = context.store
    # One of the workers is enough.
    key, life_ms = store.key("tidied"), int(TIDY_S * 900)
    if store.call(lambda client: client.set(key, b"", nx=True, px=life_ms)):
        for batch_id in context.batches.find_lost():
            store.send(BATCH, batch_id)
        for owner, file_id in context.files.list_expired():
            context.files.remove(owner, file_id)


# The worker beside a gateway


@contextmanager
def worker_beside(load: Callable[[], Celery]) -> Iterator[None]:
    """Keeps a worker of the gateway's jobs running, which ends with this process.

    Args:
        load: Gives the app, in the other process; can be pickled.
    """
    is_over, starting = threading.Event(), threading.Lock()
    # Not forked: threads and connections of ours must not be there.
    spawn: Any = multiprocessing.get_context("spawn")

    def keep() -> None:
        while True:
            # A daemon, so that multiprocessing ends it with this process.
            process = spawn.Process(target=run_worker, args=(load,), daemon=True)
            with starting:  # Half started, it would fail as this process ends.
                if is_over.is_set():
                    return
                process.start()
            process.join()
            if not is_over.wait(RESTART_S):
                code = process.exitcode
                logger.warning("the worker beside ended (%s); another one starts", code)

    threading.Thread(target=keep, daemon=True).start()
    try:
        yield
    finally:
        with starting:
            is_over.set()


@one_line_errors()
def run_worker(load: Callable[[], Celery]) -> None:
    """Runs the gateway's jobs until the process that started this one ends."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    app = load()
    # Nobody asks it anything, and figures of the app's workers are not about it.
    app.conf.update(worker_enable_remote_control=False, worker_prefetch_multiplier=1)
    app.worker_main(
        [
            *("--quiet", "worker", "--pool=threads", f"--concurrency={SLOTS}"),
            *("--queues", JOBS_QUEUE, "--hostname", f"gateway-{os.getpid()}@%h"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            "--loglevel=WARNING",
        ]
    )


def end_with_parent(folder: str | None = None) -> None:
    """Ends this process when the one that started it has ended, however it did.

    Args:
        folder: A folder of the parent's, which is still there if that was killed.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
