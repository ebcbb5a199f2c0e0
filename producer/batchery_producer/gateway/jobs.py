"""The gateway's own jobs as tasks, and the worker that runs them.

An ordinary worker: `batchery serve` starts one beside itself, and others may run elsewhere as

    celery -A batchery.app worker -I batchery_producer.gateway.jobs -Q batchery.gateway

Each such worker looks every second for what is due, one of them at a time.
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
from celery.signals import worker_ready, worker_shutdown
from kombu.exceptions import OperationalError

from batchery.cli.main import one_line_errors
from batchery.errors import BatcheryError, SettingsError
from batchery.gateway_settings import JOBS_QUEUE
from batchery.installation import get_installation
from batchery.log_pace import LogPace
from batchery.settings import Settings
from batchery_producer.gateway.batches.files import FileStore, Storage
from batchery_producer.gateway.batches.store import BatchStore, Superseded, build_work_name
from batchery_producer.gateway.batches.turn import BatchTurn, TurnContext
from batchery_producer.gateway.models import ServedModels
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import BATCH, TASKS, WEBHOOK, JobQueue, Store
from batchery_producer.gateway.task_records import TaskRecords
from batchery_producer.gateway.webhooks import Webhooks

logger = logging.getLogger(__name__)

#: How often a worker looks for what is due, in seconds.
SWEEP_S = 1.0

#: How often it looks for what killed processes have left in a folder of files, in seconds.
TORN_LOOK_S = 3600.0

#: How long after a failure a batch is tried again, in seconds.
RETRY_S = 5.0

#: Jobs that the worker beside a gateway runs at once; most of them wait.
SLOTS = 16

#: After how long a worker that has ended is started again, in seconds; and at most, where it ends
#: again and again. One that ran for longer than that could start.
RESTART_S = 1.0
MAX_RESTART_S = 60.0

#: Options of all tasks: a job whose worker died runs again.
OPTIONS: dict[str, Any] = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "ignore_result": True,
}


class Jobs:
    """What the jobs of a process share."""

    def __init__(self, app: Celery) -> None:
        settings = app_settings(app)
        store = Store(app)
        self._store = store
        self.queue = JobQueue(app, store)
        self.webhooks = Webhooks(store, TaskRecords(store), self.queue, settings.gateway)
        files = FileStore(store, Storage(settings.gateway.files))
        batches = BatchStore(store, files, self.queue)
        self._batches = TurnContext(app, ServedModels(settings.models), files, batches)

    def take_turn(self, batch_id: str, number: int) -> None:
        """Takes a batch on, and sends the job of its next turn.

        Args:
            batch_id: The batch.
            number: Of the turn; -1 for the next one.

        Raises:
            Problem: Redis is away, or a file.
            BatcheryError: So is the store, for example.
        """
        begun = self._batches.batches.begin(batch_id, number)
        if begun is None:
            return
        turn = BatchTurn(self._batches, *begun)
        record = turn.run()
        if not record.batch.is_over:
            number = turn.hand_over()
            self.queue.send(build_work_name(record), number, tenant=record.tenant)

    def remove_torn(self) -> None:
        """Removes what killed processes have left in a folder of files."""
        self._batches.files.storage.remove_torn(time.time())

    def sweep(self) -> None:
        """Sends what is due and removes what has expired, unless another worker has just done so.

        Raises:
            Problem: Redis is away.
        """
        key, life_ms = self._store.key("swept"), int(SWEEP_S * 900)
        if not self._store.call(lambda client: client.set(key, b"", nx=True, px=life_ms)):
            return
        due = self.queue.take_due()
        tasks = [each.split(" ")[1] for each in due if each.startswith(f"{WEBHOOK} ")]
        waiting = set(tasks) - set(self.webhooks.ended(tasks)) if tasks else set()
        for work in due:
            if work.split(" ")[1] not in waiting:
                self.queue.send(work)
        self._remove_expired()

    def _remove_expired(self) -> None:
        files, batches = self._batches.files, self._batches.batches
        for owner, id_ in files.expired():
            if id_.startswith("batch_"):
                batches.remove(owner, id_)
            elif batches.uses(owner, id_) is None:
                files.remove(owner, id_)


def app_settings(app: Celery, *, anew: bool = False) -> Settings:
    """The settings of an app; those of the environment and the file if `install` was not called."""
    try:
        installation = get_installation(app)
        return installation.read_settings() if anew else installation.settings
    except SettingsError:
        return Settings.load(app.conf)


@cache
def get_jobs(app: Celery) -> Jobs:
    """What the jobs of this process share."""
    return Jobs(app)


@shared_task(bind=True, name=TASKS[BATCH], **OPTIONS)
def take_turn(self: Any, batch_id: str, number: int = -1) -> None:
    """Takes a batch a little further."""
    jobs = get_jobs(self.app)
    try:
        jobs.take_turn(batch_id, number)
    except Superseded as error:
        logger.info("%s", error)
    except (BatcheryError, Problem, redis.RedisError, OperationalError) as error:
        logger.warning("batch %s: tried again soon: %s", batch_id, error)
        jobs.queue.postpone(f"{BATCH} {batch_id}", RETRY_S)


@shared_task(bind=True, name=TASKS[WEBHOOK], **OPTIONS)
def post_webhook(self: Any, task_id: str, wait_s: float = 0.0) -> None:
    """Makes one attempt to post the result of a task."""
    try:
        get_jobs(self.app).webhooks.attempt(task_id, wait_s)
    except Problem as problem:
        logger.warning("webhook of task %s: tried again soon: %s", task_id, problem)


_ended = threading.Event()


@worker_ready.connect
def begin_to_sweep(sender: Any, **_: Any) -> None:
    """Looks for what is due, if the worker has the queue."""
    if JOBS_QUEUE in sender.app.amqp.queues.consume_from:
        threading.Thread(target=_sweep_on, args=(sender.app,), daemon=True).start()


@worker_shutdown.connect
def end_sweeping(**_: Any) -> None:
    """Looks no more."""
    _ended.set()


def _sweep_on(app: Celery) -> None:
    pace, torn_look_s = LogPace(), 0.0
    while not _ended.wait(SWEEP_S):
        try:
            get_jobs(app).sweep()
            if time.monotonic() >= torn_look_s:
                torn_look_s = time.monotonic() + TORN_LOOK_S
                get_jobs(app).remove_torn()
        except Exception as error:  # noqa: BLE001 - Redis or a store may be away, and come back
            if pace.is_due(str(error)):
                logger.warning("jobs of the gateway: cannot be looked for: %s", error)


# The worker beside a gateway


@contextmanager
def worker_beside(load: Callable[[], Celery]) -> Iterator[Callable[[], None]]:
    """Keeps a worker of the gateway's jobs running, which ends with this process.

    Yields a function that has another one take its place, which reads the settings anew.

    Args:
        load: Gives the app, in the other process; can be pickled.
    """
    ending, replacing = threading.Event(), threading.Event()
    processes: list[Any] = []

    def keep() -> None:
        pause_s = RESTART_S
        while not ending.is_set():
            began_s = time.monotonic()
            # Not forked: threads and connections of ours must not be there.
            process = multiprocessing.get_context("spawn").Process(
                target=run_worker, args=(load,), daemon=True
            )
            process.start()
            processes[:] = [process]
            if ending.is_set():  # While it started.
                process.terminate()
            process.join()
            if replacing.is_set() or time.monotonic() - began_s > MAX_RESTART_S:
                pause_s = RESTART_S
            if process.exitcode and not replacing.is_set():
                text = "the worker beside ended (%s); another one starts in %g s"
                logger.warning(text, process.exitcode, pause_s)
            replacing.wait(pause_s)
            replacing.clear()
            pause_s = min(pause_s * 2, MAX_RESTART_S)

    def replace() -> None:
        replacing.set()
        for process in processes:
            process.terminate()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield replace
    finally:
        ending.set()
        replace()
        keeper.join()


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
