"""A worker whose device only sleeps, lanes that wait without end, and a log of what ran."""

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from celery import Celery
from redis import Redis

from batchery.transport.redis_schema import Keys
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.queue.systems import CELERY, WORKER
from benchmarks.scheduling.messages import Template, body_of
from benchmarks.scheduling.windows import Ran
from benchmarks.venvs import ROOT

MODULE = "benchmarks.peers.shared_tasks"
QUEUE = "celery"
TEMPLATE = "the-template"
KEYS = Keys()

#: As in the module.
BATCH_SIZE = 32

#: Pause between two looks, in seconds.
LOOK_S = 0.005

#: How long anything may take, and the worker to end, in seconds.
TIMEOUT_S = 60.0
GRACE_S = 10.0

NO_KEYWORDS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Source:
    """Jobs of one lane, one item each, which is the lane's name."""

    lane: str
    priority: int = 0
    tenant: str | None = None
    task: str = "sleep"
    keywords: Mapping[str, str] = field(default_factory=lambda: NO_KEYWORDS)
    #: Jobs that wait in Redis all the time: far more than a worker takes at once.
    depth: int = 1000


class Sleeper:
    """A Redis and a worker of our own; both end with this process."""

    def __init__(self, pass_s: float, item_s: float, devices: int = 1) -> None:
        """Starts both, and waits for the worker's first result."""
        self._folder = tempfile.TemporaryDirectory(prefix="batchery-bench-")
        self._log = Path(self._folder.name) / "batches.jsonl"
        self._log.touch()
        self._server = EmbeddedRedis().start()
        #: Address of the Redis.
        self.url = self._server.url
        self._redis: Any = Redis.from_url(self.url)
        #: A job as it stands in a queue.
        self.message = capture_message(self.url, self._redis)
        python = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._worker = GuardedProcess(
            [sys.executable, "-W", "ignore", *CELERY, MODULE, *WORKER, "-c", "1"],
            grace_s=GRACE_S,
            environment={
                **os.environ,
                "PYTHONPATH": python,
                "PEER_URL": self.url,
                "PEER_PASS_S": str(pass_s),
                "PEER_ITEM_S": str(item_s),
                "PEER_LOG": str(self._log),
                "BATCHERY_DEVICES": ",".join(f"cpu:{number}" for number in range(devices)),
            },
            keep_open=(self._server.lifeline,),
        )
        try:
            self.push(Source("the first"), 1)
            self.wait_until(lambda: bool(self._log.stat().st_size))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends worker and Redis."""
        self._worker.stop(GRACE_S)
        self._redis.close()
        self._server.stop()
        self._folder.cleanup()

    def template(self, source: Source) -> Template:
        """What the jobs of a lane are copies of."""
        return Template.of(self.message, source.task, QUEUE, source.priority, tenant=source.tenant)

    def push(self, source: Source, count: int) -> None:
        """Sends so many jobs."""
        template, body = self.template(source), body_of(source.lane, source.keywords)
        self._redis.lpush(
            template.key, *(template.copy(str(uuid.uuid4()), body) for _ in range(count))
        )

    def feed(self, sources: Sequence[Source], seconds: float) -> int:
        """Keeps jobs of all these lanes waiting for so long.

        Returns:
            Fewest that waited in Redis of any lane; 0 says that a lane was not kept busy.
        """
        keys = [self.template(source).key for source in sources]
        fewest, end_s = sys.maxsize, 0.0
        while not end_s or time.monotonic() < end_s:
            for source, key in zip(sources, keys, strict=True):
                waiting = int(self._redis.llen(key))
                fewest = min(fewest, waiting) if end_s else fewest
                if waiting < source.depth // 2:
                    self.push(source, source.depth - waiting)
            # The clock starts when all wait.
            end_s = end_s or time.monotonic() + seconds
            self._look()
        return fewest

    def settle(self) -> None:
        """Drops what waits in Redis, and waits until the worker has nothing more to do."""
        keys = [self.template(Source("any", priority)).key for priority in (0, 3, 6)]
        self._redis.delete(*keys)
        self.wait_until(lambda: not self.held())

    def held(self) -> int:
        """Jobs that the worker has taken and not answered."""
        leases = [KEYS.lease(each.decode()) for each in self._redis.zrange(KEYS.workers, 0, -1)]
        return sum(int(self._redis.hlen(each)) for each in leases)

    def waiting(self, priority: int = 0) -> int:
        """Jobs that wait in Redis."""
        return int(self._redis.llen(self.template(Source("any", priority)).key))

    def batches(self, since_s: float = 0.0) -> list[Ran]:
        """What ran, in order: the batches that began after a time of the monotonic clock."""
        lines = self._log.read_text(encoding="utf-8").splitlines(keepends=True)
        # The last line may be half written.
        made = [Ran(*json.loads(line)) for line in lines if line.endswith("\n")]
        return [each for each in made if each.begin_s >= since_s]

    def wait_until(self, is_so: Any) -> None:
        """Waits for something.

        Raises:
            SystemExit: It does not come, or the worker has ended.
        """
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_so():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the worker stopped answering:\n{self._worker.tail(30)}")
            self._look()

    def _look(self) -> None:
        if self._worker.poll() is not None:
            raise SystemExit(f"the worker ended:\n{self._worker.tail(30)}")
        time.sleep(LOOK_S)


def capture_message(url: str, redis: Any) -> bytes:
    """A real message, as it stands in a queue."""
    app = Celery("client", broker=url, backend=url, set_as_current=False)
    options: Any = {"ignore_result": True, "headers": {"ignore_result": False}}
    app.send_task("sleep", [0], queue=TEMPLATE, **options)
    app.close()
    message: bytes = redis.rpop(TEMPLATE)
    return message
