"""The whole system: jobs in Redis, a Celery worker with its device, results in Redis.

No collector, no Flower, no events. The jobs are published beforehand, into a list beside the queue
that becomes the queue when the clock starts. The run is over when nothing waits and nothing is
leased: then every result is stored, as a commit stores it before the lease goes, in one step.
"""

import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from celery import Celery
from redis import Redis

from batchery.transport.redis_schema import Keys
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.engine.sample import Sample, cpu_by_name, cpu_since
from benchmarks.engine.target import Target

KEYS = Keys()

#: Timeout of one run, in seconds.
TIMEOUT_S = 1800.0

#: Pause between two looks, in seconds; each costs Redis some microseconds.
LOOK_S = 0.005

#: How long the worker may take to end, in seconds.
GRACE_S = 10.0

WORKER = ("-l", "WARNING", "--without-mingle", "--without-gossip", "--without-heartbeat")


def devices_of(worker: int, module: str = "batchery_worker.device") -> list[psutil.Process]:
    """The processes of a worker that run a module; its others wait for ordinary jobs."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(worker).children()
        return [each for each in children if module in each.cmdline()]
    return []


class WholeSystem:
    """A Redis and a worker of our own; started once, and warm from then on."""

    name = "whole system"

    def __init__(self, target: Target, feeders: int = 0, items: int = 1) -> None:
        """Starts both, without waiting for the worker.

        Args:
            target: What they run.
            feeders: Of the device.
            items: Texts of each message.
        """
        self._items = items
        if feeders:
            self.name = f"feeders: {feeders}"
        if items > 1:
            self.name += f", {items} a message"
        self._server = EmbeddedRedis().start()
        #: Address of the Redis.
        self.url = self._server.url
        self.redis: Any = Redis.from_url(self._server.url)
        self.app = Celery("bench", broker=self._server.url, backend=self._server.url)
        models = json.loads(os.environ["BATCHERY_MODELS"])
        self._queues = {name: {**model, "feeders": feeders} for name, model in models.items()}
        command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", "batchery.app", "worker"]
        self._worker = GuardedProcess(
            [*command, *WORKER],
            env={
                **os.environ,
                "BATCHERY_REDIS_URL": self._server.url,
                "BATCHERY_MODELS": json.dumps(self._queues),
                "BATCHERY_DEVICES": target.device,
                "BATCHERY_MAX_BATCH_SIZE": str(target.batch_size),
            },
        )

    def wait_ready(self) -> None:
        """Waits for its first results; raises SystemExit if it ends before."""
        for queue in self._queues:
            self.publish(queue, ["the first"])
            self._wait(queue)
        worker = psutil.Process(self._worker.pid)
        redis = psutil.Process(self._server.pid)
        devices = devices_of(worker.pid)
        named = {"device": devices[0]}
        if cards := devices_of(worker.pid, "batchery_worker.feeders.card_process"):
            named = {f"feeder {number}": each for number, each in enumerate(devices, start=1)}
            named["card"] = cards[0]
        #: By what they are for.
        self.processes = {"worker": worker, **named, "redis": redis}

    def run(self, texts: Sequence[str], *, keep: bool = False) -> Sample:
        """Embeds all texts."""
        staged = "staged"
        ids = self.publish(staged, texts)
        before = self._batches(0)
        used, began_s = cpu_by_name(self.processes), time.perf_counter()
        self.redis.rename(staged, "embed")
        self._wait("embed")
        seconds = time.perf_counter() - began_s
        cpu_s = cpu_since(used, self.processes)
        after = self._batches(before["jobs"] + len(ids))
        keys = [f"celery-task-meta-{each}" for each in ids]
        metas = [json.loads(each) for each in self.redis.mget(keys)] if keep else []
        found = [meta["result"] for meta in metas]
        if self._items > 1:
            found = [each["ok"] for result in found for each in result]
        if self.redis.delete(*keys) != len(keys):
            raise SystemExit("whole system: results are missing")
        return Sample(
            seconds=seconds,
            cpu_s=cpu_s,
            tokens=after["tokens"] - before["tokens"],
            computed_tokens=after["computed_tokens"] - before["computed_tokens"],
            stages_s={"forward": (after["forward_ms"] - before["forward_ms"]) / 1e3},
            results=found,
        )

    def publish(self, queue: str, texts: Sequence[str], priority: int = 0) -> list[str]:
        """Sends jobs into a queue; returns their ids."""
        count = self._items
        items = [texts[start : start + count] for start in range(0, len(texts), count)]
        ids = [str(uuid.uuid4()) for _ in items]
        task = queue if queue in self._queues else "embed"
        # A client that wants a result subscribes for it, which costs more than the job.
        options: Any = {"ignore_result": True, "priority": priority}
        with self.app.producer_pool.acquire() as producer:
            for task_id, part in zip(ids, items, strict=True):
                header = {"batchery": {"v": 1, "n": len(part)}} if count > 1 else {}
                self.app.send_task(
                    *(task, [part if count > 1 else part[0]]),
                    headers={"ignore_result": False, **header},
                    **{"task_id": task_id, "queue": queue, "producer": producer, **options},
                )
        return ids

    def message(self) -> bytes:
        """A job as it stands in a queue."""
        self.publish("staged", ["any"])
        message: bytes = self.redis.rpop("staged")
        return message

    def _wait(self, queue: str) -> None:
        """Waits until nothing waits and nothing is leased; both in one look."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            # Whoever takes a job is a worker before it has a lease.
            leases = [KEYS.lease(each.decode()) for each in self.redis.zrange(KEYS.workers, 0, -1)]
            with self.redis.pipeline() as look:
                look.llen(queue)
                for lease in leases:
                    look.hlen(lease)
                if leases and not any(look.execute()):
                    return
            if self._worker.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the worker ended or stopped answering:\n{self._worker.tail()}")
            time.sleep(LOOK_S)

    def _batches(self, jobs: int) -> Mapping[str, Any]:
        """The worker's own figures, once it has counted so many jobs."""
        while True:
            answer: Any = self.app.control.inspect(timeout=GRACE_S, limit=1).stats()
            if not answer:
                raise SystemExit(f"the worker does not answer:\n{self._worker.tail()}")
            (stats,) = answer.values()
            figures: Mapping[str, Any] = stats["pool"]["batches"]
            if figures["jobs"] >= jobs:
                return figures

    def stop(self) -> None:
        """Ends worker and Redis."""
        self.app.close()
        self._worker.stop(GRACE_S)
        self.redis.close()
        self._server.stop()
