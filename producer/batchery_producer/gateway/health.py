"""Looks beside the requests: whether Redis answers, who consumes its queues, what workers do.

Requests for a queue that nobody consumes are refused, so that they do not wait in vain.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from batchery.cli.app import TIMEOUT_S, check_shard
from batchery.cli.survey import Survey, survey
from batchery.errors import StartError
from batchery.operations.exporter import ClusterWatch
from batchery.protocol.figures import WorkerFigures
from batchery.shards import list_shards, open_shards
from batchery.transport.live_workers import LiveWorkers
from batchery_producer.gateway.models import ServedModel
from batchery_producer.gateway.problems import REDIS_AWAY, Kind, Problem, redis_log_pace

logger = logging.getLogger("uvicorn.error")

#: Seconds between two looks.
INTERVAL_S = 1.0

#: Longest time between two looks, in seconds; after a longer one nothing is known of the time
#: before.
MAX_GAP_S = 5.0

#: In how many seconds a caller may come again who was refused as no worker is there.
NO_WORKER_RETRY_S = 5.0


class Health:
    """Looks whether the broker answers, and which queues no worker has consumed for a while.

    Whatever is not known for sure counts as a worker: an answer that Redis owes, a worker that
    does not say what it consumes, one without leases.
    """

    def __init__(self, app: Celery, queues: Collection[str], grace_s: float) -> None:
        """Refuses nobody yet.

        Args:
            app: Its broker is looked at.
            queues: Names of the queues that requests may need.
            grace_s: How long a queue may be without a worker, in seconds: as long as one starts.
        """
        self._app = app
        self._grace_s = grace_s
        self._seen_s = dict.fromkeys(queues, time.monotonic())
        self._looked_s = float("-inf")
        #: Names of the queues that nobody consumes.
        self._alone: set[str] = set()
        #: Why requests are refused now; empty if they are not. Names no address and no user.
        self.problem = ""
        #: Of each shard; None before it answers.
        self._workers: Sequence[LiveWorkers] | None = None
        # Of its own: threads that others share may all wait for Redis.
        self._thread = ThreadPoolExecutor(1, "batchery-health")

    def check(self, model: ServedModel | None = None) -> None:
        """Makes sure that jobs can be sent, and that a worker of a model may be there.

        Raises:
            Problem: They cannot; or nobody consumes its queue.
        """
        if self.problem:
            raise Problem(Kind.UNAVAILABLE, self.problem, retry_after_s=INTERVAL_S)
        if model is not None and model.queue in self._alone:
            raise Problem(
                Kind.UNAVAILABLE,
                f"model {model.name!r}: no worker has consumed its queue {model.queue!r} for"
                f" {self._grace_s:g} s; unless one still loads its models, start one:"
                f" celery -A batchery.app worker -Q {model.queue}",
                code="no_worker",
                retry_after_s=NO_WORKER_RETRY_S,
            )

    def note_answer(self, queue: str) -> None:
        """Notes that a worker has answered a job of a queue; the next look may be a second away."""
        self._alone.discard(queue)

    async def watch(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL_S)

    async def look(self) -> None:
        """Looks once."""
        loop = asyncio.get_running_loop()
        try:
            self._alone = await loop.run_in_executor(self._thread, self._find_alone)
            self.problem = ""
        except (StartError, OperationalError, RedisError, OSError) as error:
            if not self.problem:
                logger.warning("%s: %s", REDIS_AWAY, error)
            self.problem = REDIS_AWAY
            self._looked_s = float("-inf")

    def _find_alone(self) -> set[str]:
        """The queues that nobody consumes."""
        if self._workers is None:
            for shard in list_shards(self._app):
                check_shard(self._app, shard)
            with open_shards(self._app) as connections:
                found = [LiveWorkers.of(connection, TIMEOUT_S) for connection in connections]
            if None in found:
                return set()  # Other brokers do not say who consumes.
            self._workers = [each for each in found if each is not None]
        registered = chain.from_iterable(each.registered().values() for each in self._workers)
        live = [each for each in registered if not each.is_dead]
        now_s = time.monotonic()
        is_blind = now_s - self._looked_s > MAX_GAP_S or any(each.queues is None for each in live)
        consumed = set[str]().union(*(each.queues or () for each in live))
        self._looked_s = now_s
        for queue in self._seen_s:
            if is_blind or queue in consumed:
                self._seen_s[queue] = now_s
        alone = {queue for queue, at_s in self._seen_s.items() if now_s - at_s > self._grace_s}
        # Workers without leases cannot use a cluster.
        is_one = len(self._workers) == 1
        return set() if alone and is_one and self._workers[0].may_be_others() else alone


# What workers do: asked only while somebody wants to know, for the page and for Prometheus


#: What callers get to know of a survey that failed. The log has the reason, which may name hosts.
UNSEEN = "workers and queues cannot be looked at; the gateway's log says why"

#: How long the workers may take to answer one, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: How long somebody waits for one, in seconds; then Redis hangs.
SURVEY_S = 1.8

#: After so long without a survey, in seconds, nothing is known of the time before.
STALE_S = 2.0

#: Surveys that are kept: figures of "now" are those of about so many seconds.
KEPT_SURVEYS = 6


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What is known at one moment.

    Attributes:
        now: The last survey; None if Redis did not answer it.
        before: One a few seconds earlier, for rates; None if there is none.
        problem: Why there is no survey; empty if there is one.
        taken_s: When it was taken, on the clock of `time.monotonic`.
    """

    now: Survey | None
    before: Survey | None
    problem: str
    taken_s: float

    @property
    def age_s(self) -> float:
        """How old it is, in seconds."""
        return time.monotonic() - self.taken_s


class Monitor:
    """Surveys workers and queues at most once a second, however many ask: only if somebody does."""

    def __init__(self, app: Celery, queues: Collection[str], health: Health) -> None:
        """Starts nothing yet.

        Args:
            app: Its workers and its broker are asked.
            queues: Names of queues that are looked into even if no worker consumes them.
            health: Knows whether Redis answers; if it does not, nobody waits for a survey.
        """
        self._health = health
        self._watch = ClusterWatch(partial(survey, app, ANSWER_TIMEOUT_S, queues))
        #: The last one, and those before it.
        self._kept: deque[Survey] = deque(maxlen=KEPT_SURVEYS + 1)
        self._taken_s = float("-inf")

    async def latest(self) -> ClusterSnapshot:
        """The survey of this moment; it takes up to about a second, also without Redis."""
        asked = asyncio.wrap_future(self._watch.ask())
        # Whoever asked may have left before it fails.
        asked.add_done_callback(lambda each: each.cancelled() or each.exception())
        # A caller who hangs up does not cancel it for the others.
        await asyncio.wait({asked}, timeout=0 if self._health.problem else SURVEY_S)
        if not asked.done():
            return ClusterSnapshot(None, None, REDIS_AWAY, time.monotonic())
        if error := asked.exception():
            if redis_log_pace.is_due(str(error)):
                logger.warning("%s: %s", type(error).__name__, error)
            return ClusterSnapshot(None, None, UNSEEN, time.monotonic())
        now = asked.result()
        if not self._kept or now is not self._kept[-1]:
            if time.monotonic() - self._taken_s > STALE_S:
                self._kept.clear()
            self._taken_s = time.monotonic()
            self._kept.append(now)
        before = self._kept[0] if len(self._kept) > 1 else None
        return ClusterSnapshot(now, before, "", self._taken_s)

    async def workers(self) -> Mapping[str, WorkerFigures]:
        """The figures of each worker with devices.

        Raises:
            Problem: Redis is away.
        """
        look = await self.latest()
        if look.now is None:
            raise Problem(Kind.UNAVAILABLE, look.problem, retry_after_s=INTERVAL_S)
        return look.now.figures
