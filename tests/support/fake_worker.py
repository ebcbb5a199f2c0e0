"""A worker's pool with fake device processes, a fake event loop and a fake broker.

All of our own code is real; so are Celery's requests, tracer and result backend.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from celery.worker import state as worker_state
from kombu.message import Message

from apps.batches import FOUR
from batchery.installation import get_installation
from batchery.task import BatchTask
from batchery.transport.leases import Deaths
from batchery.transport.redis_schema import Keys
from batchery_worker.completion.ordinary import OrdinaryThreads
from batchery_worker.device_pool.startup import choose_devices
from batchery_worker.ipc.messages import Work
from batchery_worker.pool import HybridPool
from batchery_worker.request import BatchRequest
from support.fake_devices import FakeDevice, FakeDevices, Loop

_ids = map("job-{}".format, itertools.count(1))


class FakeLeaseStore:
    """The leases of a worker, without Redis."""

    worker = "w1"
    keys = Keys()
    lease_key = "batchery:lease:w1"
    db = 0

    def __init__(self) -> None:
        #: Tokens that Redis has, and tokens that the worker takes for held.
        self.held: set[str] = set()
        self.believed: set[str] = set()
        #: How many workers died while a job ran alone, by token.
        self.died: dict[str, Deaths] = {}
        self.dead_letters: dict[str, str] = {}
        self.acknowledged: list[str] = []

    def ack(self, token: str) -> None:
        self.acknowledged.append(token)

    def holds(self, token: str) -> bool:
        return token in self.believed

    def still_held(self, tokens: list[str]) -> set[str]:
        return self.held.intersection(tokens)

    def get_key(self, token: str) -> str | None:
        return "fours" if token in self.believed else None

    def deaths(self, token: str) -> Deaths | None:
        return self.died.get(token)

    def began(self, jobs: Mapping[str, str], *, alone: bool, in_slots: bool = False) -> int:
        return 1

    def flush(self) -> None:
        """Does nothing: no acknowledgement waits."""

    def ended(self, batch: int) -> None:
        """Does nothing: no test reads the notes."""

    def committed(self, tokens: list[str]) -> None:
        self.believed.difference_update(tokens)

    lost = committed

    def dead_letter_on_ack(self, token: str, letter: str) -> None:
        self.dead_letters[token] = letter


class FakeChannel:
    """A broker's channel, which remembers acknowledged and rejected messages."""

    no_ack_consumers = None

    def __init__(self) -> None:
        self.lease_store: FakeLeaseStore | None = None
        self.acknowledged: list[str] = []
        self.rejected: list[tuple[str, bool]] = []

    def basic_ack(self, tag: str, multiple: bool = False) -> None:
        self.acknowledged.append(tag)

    def basic_reject(self, tag: str, requeue: bool = False) -> None:
        self.rejected.append((tag, requeue))


class FakeWorker:
    """Receives messages as Celery's worker does, and hands them to the pool."""

    def __init__(self, app: Celery, devices: FakeDevices, loop: Loop) -> None:
        """Starts the pool: its devices are ready, and the loop is about to run."""
        self.app = app
        self.devices = devices
        self.loop = loop
        self.channel = FakeChannel()
        self._tags = itertools.count(1)
        tasks = [task for task in app.tasks.values() if isinstance(task, BatchTask)]
        settings = get_installation(app).settings
        self.pool = HybridPool(
            OrdinaryThreads(2, app=app), app, tasks, choose_devices(settings.devices)
        )
        self.pool.start()
        self.pool.register_with_event_loop(loop)
        self.loop.settle()

    def receive_each(self, *items: Any, task: str = FOUR, **headers: Any) -> list[BatchRequest]:
        """Receives messages, one for each item."""
        return [self.receive(item, task=task, **headers) for item in items]

    def receive(self, *args: Any, task: str = FOUR, **headers: Any) -> BatchRequest:
        """Receives a message; the pool handles it when the loop turns.

        Args:
            args: Positional arguments of the job.
            task: Name of its task.
            headers: Headers of the message; in addition `kwargs`, `redelivered`, `priority`, and
                `deaths`: how many workers died while the job ran alone.
        """
        keywords, deaths = headers.pop("kwargs", {}), headers.pop("deaths", None)
        tag = str(next(self._tags))
        known: dict[str, Any] = {"id": next(_ids), "task": task, "lang": "py", "retries": 0}
        message = Message(
            body=json.dumps([list(args), keywords, {}]),
            channel=self.channel,
            delivery_tag=tag,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info={"redelivered": headers.pop("redelivered", False)},
            properties={"priority": headers.pop("priority", 0)},
            headers={**known, **headers},
            accept={"application/json"},
        )
        if self.channel.lease_store is not None:
            self.channel.lease_store.held.add(tag)
            self.channel.lease_store.believed.add(tag)
            if deaths is not None:
                self.channel.lease_store.died[tag] = Deaths(deaths)
        request = BatchRequest(
            message,
            app=self.app,
            task=self.app.tasks[task],
            hostname="fake@worker",
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
            connection_errors=(),
        )
        worker_state.task_reserved(request)
        request.execute_using_pool(self.pool)
        return request

    def reconnect(self) -> None:
        """Breaks the broker's connection, and starts a new event loop."""
        self.pool.flush()
        self.loop = Loop(self.loop.clock)
        self.pool.register_with_event_loop(self.loop)
        self.loop.settle()

    @property
    def device(self) -> FakeDevice:
        """The process that was started last."""
        return self.devices.started[-1]

    def works(self, device: FakeDevice | None = None) -> list[list[Any]]:
        """The items of each batch that a device was given, in order."""
        self.loop.settle()
        return [read_items(work) for work in (device or self.device).hear()]

    def work_off(self) -> None:
        """Makes devices answer their batches, or die of them, until none is left."""
        for _ in range(100):
            # Dead devices restart meanwhile.
            self.loop.sleep(1.0)
            worked = [device.work() for device in self.devices.started]
            if not any(worked):
                return
        raise AssertionError("there is always something left")

    def result(self, job: str) -> Any:
        """The result that the job's caller gets; raises its error."""
        result: AsyncResult[Any] = self.app.AsyncResult(job)
        self.loop.until(result.ready, f"{job} is answered")
        return result.get(timeout=1)

    def results(self, requests: Sequence[BatchRequest]) -> list[Any]:
        """The results that their callers get."""
        return [self.result(request.id) for request in requests]

    def settled(self, *requests: BatchRequest) -> None:
        """Waits until the messages are acknowledged."""
        self.loop.until(lambda: all(each.acknowledged for each in requests), "acknowledged")

    def info(self) -> Mapping[str, Any]:
        """What `celery inspect stats` shows of the pool."""
        return self.pool.figures() or {}


StartPool = Callable[..., FakeWorker]


def read_items(work: Work) -> list[Any]:
    """All items of a batch."""
    return [item for _, items, _ in work.jobs for item in items]
