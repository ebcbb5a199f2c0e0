"""What the gateway does besides its requests, batches and webhooks, and the worker that does it.

An ordinary worker: `batchery serve` starts one beside itself, and others may run elsewhere as

    celery -A batchery.app worker -I batchery_producer.gateway.jobs -Q batchery.gateway

Webhooks are its tasks. Batches are run by a thread of it, which finds them in Redis.
"""

import asyncio
import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from celery import Celery, shared_task
from celery.exceptions import Reject
from celery.signals import worker_ready, worker_shutting_down

from batchery.cli.main import one_line_errors
from batchery.errors import SettingsError
from batchery.gateway_settings import JOBS_QUEUE, GatewaySettings
from batchery.installation import get_installation
from batchery.log_pace import LogPace
from batchery.settings import Settings
from batchery_producer.gateway.batch_run import BatchRun
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.running import Gateway, running
from batchery_producer.gateway.store import Store, TaskRecord
from batchery_producer.gateway.webhooks import PAUSES_S, Undeliverable, post_result
from batchery_producer.gateway.webhooks import TASK as WEBHOOK

logger = logging.getLogger(__name__)

#: How often a worker looks for batches that nobody runs, in seconds.
LOOK_S = 1.0

#: Batches of one owner that a worker runs at once.
OWNER_RUNS = 16

#: How long a request of a batch may take before it is made again, in seconds.
REQUEST_S = 3600.0

#: How long after a failure a job is tried again, in seconds.
RETRY_S = 5.0

#: Webhooks that the worker beside a gateway posts at once.
SLOTS = 8

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
def get_store(app: Celery) -> tuple[Store, GatewaySettings]:
    """What the webhooks of this process share."""
    return Store(app), app_settings(app).gateway


@shared_task(bind=True, name=WEBHOOK, **OPTIONS)
def post_webhook(self: Any, url: str, task: dict[str, Any], attempts: int = 0) -> None:
    """Makes one attempt to post the result of a task."""
    where = f"webhook of task {task['id']} to {url}"
    try:
        post_result(*get_store(self.app), url, TaskRecord(**task))
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


# Batches


@worker_ready.connect
def begin_batches(sender: Any, **_: Any) -> None:
    """Runs batches until the worker stops, if it has the queue."""
    if JOBS_QUEUE in sender.app.amqp.queues.consume_from:
        is_over = threading.Event()
        worker_shutting_down.connect(lambda **_: is_over.set(), weak=False)
        work = run_batches(sender.app, is_over)
        threading.Thread(target=asyncio.run, args=(work,)).start()


async def run_batches(app: Celery, is_over: threading.Event) -> None:
    """Runs batches that are not over and that nobody else runs."""
    settings = app_settings(app)
    # Workers that start on demand start when there are jobs.
    own = {"timeout_s": REQUEST_S, "worker_grace_s": math.inf}
    gateway_settings = settings.gateway.model_copy(update=own)
    settings = settings.model_copy(update={"gateway": gateway_settings})
    runs: dict[str, asyncio.Task[None]] = {}
    pace = LogPace()
    async with running(app, settings, Measurements()) as gateway:
        while not is_over.is_set():
            try:
                await take_batches(gateway, runs)
            except Exception as error:  # noqa: BLE001 - Redis may be away, and come back
                if pace.is_due(str(error)):
                    logger.warning("jobs of the gateway: cannot be looked for: %s", error)
            await asyncio.sleep(LOOK_S)
        for each in runs.values():
            each.cancel()
        await asyncio.gather(*runs.values(), return_exceptions=True)


async def take_batches(gateway: Gateway, runs: dict[str, asyncio.Task[None]]) -> None:
    """Begins batches that nobody runs; of one owner some at a time, so that all have their turn.

    Raises:
        Problem: Redis is away.
    """
    batches = gateway.batches
    open_now = await asyncio.to_thread(batches.list_open)
    for batch_id in [each for each, run in runs.items() if run.done()]:
        del runs[batch_id]
    counts = Counter(owner for owner, batch_id in open_now if batch_id in runs)
    for owner, batch_id in open_now:
        if batch_id in runs or counts[owner] >= OWNER_RUNS:
            continue
        if await asyncio.to_thread(batches.take, batch_id):
            counts[owner] += 1
            runs[batch_id] = asyncio.create_task(run_batch(gateway, batch_id))


async def run_batch(gateway: Gateway, batch_id: str) -> None:
    """Runs a batch that was taken, and leaves it to others if that fails."""
    batches = gateway.batches
    try:
        record = await asyncio.to_thread(batches.load, batch_id)
        if record is not None and not record.is_over:
            await BatchRun(gateway, record).run()
    except Exception as error:  # noqa: BLE001 - a batch must not end because of it
        logger.warning("batch %s: tried again soon: %s", batch_id, error)
        await asyncio.sleep(RETRY_S)
    finally:
        with suppress(Problem):  # It counts as left when it shows no sign of life.
            await asyncio.to_thread(batches.leave, batch_id)


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
