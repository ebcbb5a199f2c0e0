"""Submits jobs so that it is certain, whatever happens to Redis meanwhile, what was submitted once.

Messages are Celery's own, captured in memory. Those of one job are put again until that was
confirmed.
"""

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from queue import Queue
from typing import Any

from celery import Celery, chain, chord
from kombu.transport import memory

from batchery import install
from batchery.broker_url import is_cluster
from benchmarks.chaos.tasks import BATCH_TASKS, ORDINARY, QUEUE, STEP, TOTAL
from benchmarks.chaos.ways import RabbitWay, RedisWay
from benchmarks.chaos.workload import Kind, Order
from benchmarks.redis_clients import AWAY

#: Time of jobs with a countdown, in seconds: no device holds them meanwhile.
LATER_S = 6.0

#: Batch tasks have queues of their own, as with `delay`.
ROUTES = {name: {"queue": name} for name in BATCH_TASKS}


@dataclass(frozen=True, slots=True)
class Submission:
    """One job that is in Redis for certain."""

    order: Order
    #: Ids of all its tasks; the last one has the result of the whole.
    task_ids: tuple[str, ...]
    #: Those of its tasks that batch tasks send, each of which must be sent once. What an ordinary
    #: task sends is sent again when that task runs again, as on stock Celery.
    sent_once: frozenset[str]


class Outbox:
    """Jobs on their way to Redis, in order."""

    def __init__(self, url: str, broker_url: str) -> None:
        """Prepares to send.

        Args:
            url: Redis or cluster of the batch jobs; it may be down at any time.
            broker_url: The broker; the same where batch jobs are with it.
        """
        self._app = Celery("outbox", set_as_current=False)
        self._app.conf.update(
            broker_url="memory://",
            result_backend=url,
            result_backend_transport_options={"retry_policy": {"max_retries": 0}},
            task_default_queue=QUEUE,
            task_routes=ROUTES,
            task_publish_retry=False,
        )
        if is_cluster(url):
            install(self._app)
        _silence(self._app.backend)
        self._own = RedisWay(url)
        self._broker: RedisWay | RabbitWay = self._own
        if broker_url.startswith("amqp"):
            self._broker = RabbitWay(broker_url, (QUEUE, *BATCH_TASKS))
        elif broker_url != url:
            self._broker = RedisWay(broker_url)
        self._waiting: deque[Order] = deque()
        self._ready: tuple[Submission, list[str]] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (self._ready is not None)

    def add(self, orders: Iterable[Order]) -> None:
        """Takes more jobs."""
        self._waiting.extend(orders)

    def flush(self, most: int = 100) -> list[Submission]:
        """Submits what it can; returns what Redis has confirmed. The rest waits for the next call.

        Args:
            most: Jobs at a time, so that the caller can look after other things.
        """
        done: list[Submission] = []
        try:
            while len(self) and len(done) < most:
                if self._ready is None:
                    self._ready = self._prepare(self._waiting[0])
                    self._waiting.popleft()
                submission, messages = self._ready
                self._way(submission.order).put(submission.order.number, messages)
                self._ready = None
                done.append(submission)
        except AWAY:
            pass  # It is down, full, or reading its data: the next call tries again.
        return done

    def throw(self, message: bytes) -> bool:
        """Puts something into the queue as it is; returns whether Redis took it."""
        try:
            self._own.throw(QUEUE if self._broker is self._own else STEP, message)
        except AWAY:
            return False
        return True

    def close(self) -> None:
        """Closes its connections."""
        self._own.close()
        self._broker.close()
        self._app.close()

    def _way(self, order: Order) -> RedisWay | RabbitWay:
        """Ordinary jobs go to the broker; to a RabbitMQ every other one, as of stock clients."""
        by_broker = not self._broker.is_exact and order.number % 2 == 1
        return self._broker if by_broker or order.kind is Kind.ORDINARY else self._own

    def _prepare(self, order: Order) -> tuple[Submission, list[str]]:
        _captured()  # What a failed attempt has left behind.
        signature = self._signature(order)
        last = signature.apply_async()
        messages = [json.dumps(message) for message in _captured()]
        sent = [json.loads(message)["headers"]["id"] for message in messages]
        ids = [last.id]
        while order.kind in (Kind.CHAIN, Kind.MIXED_CHAIN) and (last := last.parent):
            ids.insert(0, last.id)
        # Parts of a chord come before its body.
        every = tuple(dict.fromkeys([*(each for each in sent if each != ids[-1]), *ids]))
        once = frozenset(every) - frozenset(sent)
        if order.kind is Kind.MIXED_CHAIN:
            once -= {ids[-1]}
        if not self._way(order).is_exact:
            # What is there twice sends what follows twice.
            once = frozenset()
        return Submission(order, every, once), messages

    def _signature(self, order: Order) -> Any:
        items = order.items
        step, ordinary = self._app.signature(STEP), self._app.signature(ORDINARY)
        match order.kind:
            case Kind.PLAIN:
                return step.clone((items[0],))
            case Kind.LATER:
                return step.clone((items[0],), countdown=LATER_S)
            case Kind.ORDINARY:
                return ordinary.clone((items[0],))
            case Kind.MULTI_ITEM:
                header: Any = {"batchery": {"v": 1, "n": len(items)}}
                return step.clone((items,), headers=header)
            case Kind.CHAIN:
                return chain(step.clone((items[0],)), *[step.clone() for _ in items[1:]])
            case Kind.MIXED_CHAIN:
                return chain(step.clone((items[0],)), ordinary, step.clone())
            case Kind.CHORD:
                return chord([step.clone((item,)) for item in items], self._app.signature(TOTAL))


def _silence(backend: Any) -> None:
    """Lets a backend prepare chords, and subscribe to nothing: the watcher sees all results."""
    backend.on_task_call = backend.on_result_fulfilled = lambda *_, **__: None
    # Called for each part of a chord; Redis may be down.
    backend.add_pending_result = lambda result, **_: result


def _captured() -> list[Any]:
    found = []
    for name in (QUEUE, *BATCH_TASKS):
        queue: Queue[Any] = memory.Channel.queues.get(name, Queue())
        found += [queue.get_nowait() for _ in range(queue.qsize())]
    return found
