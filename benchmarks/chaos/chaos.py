"""One run of the fault harness, from the first job to the verdict."""

import bisect
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from batchery.errors import StartError
from benchmarks.chaos.cluster import Cluster
from benchmarks.chaos.families import Families
from benchmarks.chaos.garbage import garbage
from benchmarks.chaos.ledger import executions, receipts
from benchmarks.chaos.outbox import Outbox, Submission
from benchmarks.chaos.plan import Plan
from benchmarks.chaos.recovery import recoveries
from benchmarks.chaos.sampler import Exporter, Sampler
from benchmarks.chaos.schedule import Action, Event, again, schedule
from benchmarks.chaos.tasks import BATCH_TASKS, QUEUE
from benchmarks.chaos.verdict import Verdict
from benchmarks.chaos.watcher import Watcher
from benchmarks.chaos.workload import Order, orders
from benchmarks.redis_clients import connect

#: Pause between two looks at the clock, in seconds.
TICK_S = 0.02

#: How long workers may take to be ready, in seconds.
START_S = 120.0

#: More than workers can do in a round of faults.
MAX_CALIBRATION_JOBS = 1_000_000

#: So many workers that end before the first job are no accident.
MAX_FAILED_STARTS = 3


def run(
    plan: Plan,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Runs a plan; everything that it starts has ended when it returns.

    Args:
        plan: What to do.
        folder: An empty folder for data, logs and ledgers.
        say: Is told what happens, line by line.

    Raises:
        RedisUnavailable: There is no redis-server, or it does not start.
        StartError: No worker starts.
    """
    with contextlib.ExitStack() as stack:
        cluster = Cluster(plan, folder, say, time.monotonic)
        stack.callback(cluster.close)
        outbox = Outbox(cluster.redis.url, cluster.broker_urls[1])
        stack.callback(outbox.close)
        watcher = Watcher(cluster.redis.url, time.monotonic, plan.keep_s)
        stack.callback(watcher.close)
        started_s = time.monotonic()
        chaos = Run(plan, cluster, outbox, watcher)
        chaos.warm_up()
        chaos.calibrate()
        if plan.load:
            say(f"the workers can do {chaos.capacity_per_s:.1f} jobs/s")
        sampler = _watch(plan, cluster, folder, stack) if plan.sample_s else None
        chaos.torment()
        if sampler is not None:
            sampler.close()
        chaos.settle()
        watcher.final_look()
        verdict = Verdict(
            plan.transport,
            plan.seed,
            0.0,
            {str(action): count for action, count in cluster.done.items()},
            ended=cluster.ended,
        )
        with contextlib.closing(connect(cluster.redis.url)) as redis:
            verdict.judge(chaos.submissions, watcher.answers, Traces(redis).has)
            verdict.unknown_keys = _list_unknown(redis)
        verdict.count(chaos.submissions, receipts(cluster.ledger), executions(cluster.ledger))
        verdict.follow(
            recoveries(
                cluster.losses, receipts(cluster.ledger), watcher.answers.first, cluster.faults_s
            )
        )
        verdict.capacity_per_s = chaos.capacity_per_s
        if sampler is not None:
            verdict.samples, verdict.growth = sampler.samples, sampler.growth
            verdict.failed_scrapes = sampler.exporter.failed
            verdict.unknown_keys += sorted(sampler.unknown)
        verdict.seconds = time.monotonic() - started_s
        return verdict


def _watch(plan: Plan, cluster: Cluster, folder: Path, stack: contextlib.ExitStack) -> Sampler:
    exporter = Exporter(folder)
    stack.callback(exporter.close)
    return Sampler(
        cluster.redis.url,
        lambda: cluster.processes,
        exporter,
        every_s=plan.sample_s,
        keep_s=plan.keep_s,
    )


def _list_unknown(redis: Any) -> list[str]:
    """The keys of a Redis that belong to no family."""
    families = Families(QUEUE, *BATCH_TASKS)
    names = (key.decode(errors="replace") for key in redis.scan_iter(count=1000))
    return [name for name in names if families.find(name) is None]


class Run:
    """The acts of a run."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        outbox: Outbox,
        watcher: Watcher,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        #: Jobs that are in Redis for certain.
        self.submissions: list[Submission] = []
        #: Jobs per second; 0 without a calibration.
        self.capacity_per_s = 0.0
        self._plan = plan
        self._cluster = cluster
        self._outbox = outbox
        self._watcher = watcher
        self._clock = clock
        self._sleep = sleep
        self._garbage: deque[int] = deque()

    def warm_up(self) -> None:
        """Waits until the first workers consume.

        Raises:
            StartError: They cannot; the text has their last words.
        """
        deadline_s = self._clock() + START_S
        while not self._cluster.is_ready:
            self._cluster.tend()
            if self._cluster.ended >= MAX_FAILED_STARTS or self._clock() > deadline_s:
                raise StartError(f"no worker starts: {self._cluster.last_words}")
            self._sleep(TICK_S)

    def calibrate(self) -> None:
        """Sees how many jobs per second the workers can do; the plan's load is a part of that.

        Each fault comes as often as in one round of the plan: what it costs is no part of what
        they can do.

        Raises:
            StartError: Results are missing in the end.
        """
        tasks = self._plan.calibration_tasks
        if not tasks:
            return
        plan = replace(self._plan, rounds=1, jobs=MAX_CALIBRATION_JOBS)

        def due(now_s: float) -> int:
            # A job may have several tasks, so there may be a few more.
            missing = tasks - self._watcher.unanswered - len(self._outbox)
            return max(0, missing) if now_s < plan.duration_s else 0

        begun_s = self._clock()
        self._play(plan, orders(plan), due)
        self.settle()
        if missing := self._watcher.unanswered:
            raise StartError(f"the calibration lacks {missing} results")
        self.capacity_per_s = len(self.submissions) / (self._clock() - begun_s)
        jobs = int(self._plan.load * self.capacity_per_s * self._plan.duration_s)
        self._plan = replace(self._plan, jobs=jobs)

    def torment(self) -> None:
        """Submits the jobs at an even rate, while the schedule goes on."""
        plan, before = self._plan, len(self.submissions)
        taken = 0

        def due(now_s: float) -> int:
            nonlocal taken
            new = int(min(1.0, now_s / plan.duration_s) * plan.jobs) - taken
            taken += new
            return new

        self._play(plan, orders(plan, before), due)

    def _play(self, plan: Plan, waiting: Iterator[Order], due: Callable[[float], int]) -> None:
        """Does what a plan's schedule has, and submits what is due at each time."""
        begun_s, now_s = self._clock(), 0.0
        events = schedule(plan)
        # Nothing is waited for without end: a device that never starts cannot be killed.
        last_s = plan.duration_s + START_S
        while events or now_s < plan.duration_s or self._outbox or self._garbage:
            now_s = self._clock() - begun_s
            while events and events[0].at_s <= now_s:
                event = events.pop(0)
                if not self._do(event) and now_s < last_s:
                    for later in again(event):
                        bisect.insort(events, later)
            self._outbox.add(islice(waiting, due(now_s)))
            self._submit()
            self._cluster.tend()
            self._sleep(TICK_S)

    def settle(self) -> None:
        """Waits for the answers, until there was none for as long as the plan's patience."""
        self._cluster.heal()
        seen, since_s = -1, self._clock()
        ready_s = since_s + START_S
        while self._watcher.unanswered and self._clock() - since_s < self._plan.patience_s:
            # A worker that starts is progress, too, unless that goes on and on.
            starts = not self._cluster.is_ready and self._clock() < ready_s
            if self._watcher.answered != seen or starts:
                seen, since_s = self._watcher.answered, self._clock()
            self._cluster.tend()
            self._sleep(TICK_S)

    def _do(self, event: Event) -> bool:
        if event.action is not Action.MALFORMED:
            return self._cluster.apply(event)
        self._garbage.append(event.number)
        return True

    def _submit(self) -> None:
        done = self._outbox.flush()
        self.submissions += done
        for submission in done:
            self._watcher.expect(submission.task_ids)
        while self._garbage and self._outbox.throw(garbage(self._garbage[0])):
            self._garbage.popleft()
            self._cluster.done[Action.MALFORMED] += 1


class Traces:
    """Every message that is somewhere in a Redis or cluster, wherever a transport keeps it.

    What a broker beside it still has counts as lost, not as stuck.
    """

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._text: bytes | None = None

    def has(self, task_id: str) -> bool:
        """Whether a key that is no result mentions a task."""
        if self._text is None:
            self._text = b"\0".join(self._values())
        return task_id.encode() in self._text

    def _values(self) -> Iterator[bytes]:
        redis = self._redis
        for key in redis.scan_iter(count=1000):
            with contextlib.suppress(ResponseError):
                match redis.type(key):
                    case b"list":
                        yield from redis.lrange(key, 0, -1)
                    case b"hash":
                        yield from redis.hvals(key)
                    case b"zset":
                        yield from redis.zrange(key, 0, -1)
                    case b"set":
                        yield from redis.smembers(key)
