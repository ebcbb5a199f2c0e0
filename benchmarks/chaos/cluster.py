"""The system under test: servers and a changing number of workers, and all that is done to them."""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from batchery.errors import StartError
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.chaos.faulty_cluster import FaultyCluster
from benchmarks.chaos.member import Member
from benchmarks.chaos.plan import POOLS, Plan
from benchmarks.chaos.recovery import Loss
from benchmarks.chaos.schedule import DISTURBING, Action, Event
from benchmarks.chaos.server import FaultyRedis
from benchmarks.chaos.tasks import MODULE
from benchmarks.rabbitmq import OwnRabbitMQ, find_rabbitmq
from benchmarks.venvs import ROOT

T = TypeVar("T")

#: What is done to one worker, or to one of its processes.
KILLS_AND_STOPS = (
    Action.KILL_WORKER,
    Action.KILL_DEVICE,
    Action.KILL_CHILD,
    Action.STOP_WORKER,
)


class Cluster:
    """Servers and workers; `close` ends them all."""

    def __init__(
        self, plan: Plan, folder: Path, say: Callable[[str], None], clock: Callable[[], float]
    ) -> None:
        """Starts it; `is_ready` says when the workers consume.

        Args:
            plan: What it is made of.
            folder: An empty one, for its data, logs and ledgers.
            say: Is told what happens.
            clock: The one that the ledger goes by.

        Raises:
            RedisUnavailable: There is no redis-server, or it does not start.
            StartError: There is no RabbitMQ.
            TimeoutError: A server does not start.
        """
        #: Where executions are written down.
        self.ledger = folder / "ledger"
        #: What was done, and how often.
        self.done: Counter[Action] = Counter()
        #: When workers, Redis or the network were disturbed.
        self.faults_s: list[float] = []
        #: Workers that were killed or stopped, and when.
        self.losses: list[Loss] = []
        #: Workers that ended without being told to.
        self.ended = 0
        #: The end of the log of the last of them.
        self.last_words = ""
        self._folder = folder
        self._say = say
        self._clock = clock
        self._elders = plan.elders
        #: In the order in which they were started.
        self._members: list[Member] = []
        self._started = 0
        #: Of workers that have ended. Every other one that starts takes such a name, as if it had
        #: been restarted in its place.
        self._free_names: list[str] = []
        self._stack = contextlib.ExitStack()
        where = folder / "redis"
        #: With batch jobs and results.
        self.redis = FaultyCluster(where) if plan.cluster else FaultyRedis(where)
        self._stack.callback(self.redis.close)
        self._rabbit = self._start_rabbit(folder / "rabbitmq") if plan.rabbitmq else None
        #: The app's broker, as workers and the harness reach it.
        self.broker_urls = self._find_brokers(plan)
        self.ledger.mkdir()
        text = MODULE.format(
            root=str(ROOT),
            broker=self.broker_urls[0],
            url=self.redis.worker_url,
            transport=plan.transport,
            folder=str(self.ledger),
            batch_s=plan.batch_s,
            keep_s=plan.keep_s,
        )
        (folder / "chaos_app.py").write_text(text, encoding="utf-8")
        self._scale(plan.workers)

    @property
    def is_ready(self) -> bool:
        """Whether all workers that shall stay consume."""
        return all(member.is_ready for member in self._staying)

    def apply(self, event: Event) -> bool:
        """Does one thing, but no MALFORMED; returns whether there was anything to do it to."""
        if event.action is Action.SCALE:
            what = self._scale(event.number)
        elif event.action in KILLS_AND_STOPS:
            what = self._hit(event)
        else:
            what = self._do(event.action, event.pick)
        if what:
            self.done[event.action] += 1
            if event.action in DISTURBING:
                self.faults_s.append(self._clock())
        self._say(f"{event.at_s:6.1f} s  {event.action}: {what or 'nothing there'}")
        return bool(what)

    def tend(self) -> None:
        """Notices workers that have ended, and replaces those that were not told to."""
        for member in list(self._members):
            if (code := member.poll()) is None:
                continue
            self._members.remove(member)
            self._free_names.append(member.name)
            member.close()
            if not member.is_leaving:
                self.ended += 1
                self.last_words = member.last_words
                self._say(f"{member.name} ended, exit code {code}: {self.last_words}")
                self._start()

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Role and process id of all that runs and is measured."""
        found = [("redis", self.redis.pid)]
        for member in list(self._members):
            if member.is_ready and not member.is_stopped:
                elder = "elder " if member in self._members[: self._elders] else ""
                found.append((f"{elder}main process", member.pid))
                found += [("device process", pid) for pid in member.devices()]
                found += [("pool process", pid) for pid in member.children()]
        return found

    def heal(self) -> None:
        """Ends every fault: Redis is up and has room, and a worker runs."""
        self.redis.heal()
        if self._rabbit is not None:
            self._rabbit.start()
        while self._do(Action.CONTINUE_WORKER):
            pass
        self._scale(max(1, len(self._staying)))

    def close(self) -> None:
        """Kills the workers, then stops the servers."""
        for member in self._members:
            member.close()
        self._stack.close()

    @property
    def _staying(self) -> list[Member]:
        return [member for member in self._members if not member.is_leaving]

    def _start_rabbit(self, folder: Path) -> OwnRabbitMQ:
        program = find_rabbitmq()
        if program is None:
            raise StartError("no RabbitMQ on this machine: `apt install rabbitmq-server`")
        made = OwnRabbitMQ(folder, program)
        self._stack.callback(made.stop)
        made.wait_ready()
        return made

    def _find_brokers(self, plan: Plan) -> tuple[str, str]:
        if self._rabbit is not None:
            return self._rabbit.url, self._rabbit.url
        if not plan.is_apart:
            return self.redis.worker_url, self.redis.url
        # Nobody disturbs it.
        server = self._stack.enter_context(EmbeddedRedis())
        return server.url, server.url

    def _start(self) -> None:
        self._started += 1
        name = f"w{self._started}"
        if self._free_names and self._started % 2:
            name = self._free_names.pop()
        pools = [member.pool for member in self._staying]
        pool = min(POOLS, key=pools.count)
        self._members.append(Member(name, pool, self._folder))

    def _scale(self, number: int) -> str:
        """Starts workers, or ends some in an orderly way, until there are so many."""
        before = self._staying
        number = max(number, self._elders)
        for member in before[number:]:
            member.leave()
        for _ in range(number - len(before)):
            self._start()
        return f"{len(before)} to {number}"

    def _hit(self, event: Event) -> str:
        """Does something to one worker, if possible to one that consumes."""
        up = [member for member in self._staying if not member.is_stopped]
        if event.action is Action.KILL_CHILD:
            return _kill_one(up, Member.children, event.pick)
        if event.action is Action.KILL_DEVICE:
            return _kill_one(up, Member.devices, event.pick)
        if event.action is Action.KILL_WORKER:
            up = [member for member in up if member not in self._staying[: self._elders]]
        victim = _pick([member for member in up if member.is_ready] or up, event.pick)
        if victim is None:
            return ""
        ready = [each for each in self._staying if each.is_ready and not each.is_stopped]
        others = len([each for each in ready if each is not victim])
        at_s = self._clock()
        if event.action is Action.KILL_WORKER:
            victim.kill()
        else:
            # Half of them with all processes, as when a whole machine is paused.
            victim.stop(with_others=event.pick < 0.5)
        self.losses.append(Loss(victim.name, at_s, event.action, others))
        return victim.name

    def _do(self, action: Action, pick: float = 0.0) -> str:
        """Does something to a server, or continues the worker that was stopped first."""
        match action:
            case Action.CONTINUE_WORKER:
                return self._go_on()
            case Action.CUT:
                return f"{self.redis.cut()} of them"
            case Action.BROKER_DOWN if self._rabbit is not None:
                self._rabbit.kill()
            case Action.BROKER_UP if self._rabbit is not None:
                self._rabbit.start()
            case _:
                return "done" if self._do_to_redis(action, pick) else ""
        return "done"

    def _go_on(self) -> str:
        stopped = [member for member in self._members if member.is_stopped][:1]
        for member in stopped:
            member.go_on()
        return " ".join(member.name for member in stopped)

    def _do_to_redis(self, action: Action, pick: float) -> bool:
        """Does something to Redis, or to a node of a cluster; returns whether it could be done."""
        redis = self.redis
        match action:
            case Action.REDIS_DOWN:
                return redis.kill(pick)
            case Action.REDIS_UP:
                return redis.restart()
            case Action.FILL:
                return redis.fill()
            case Action.FREE:
                return redis.free()
            case Action.FAIL_OVER:
                return redis.fail_over(pick)
            case Action.FOLLOW:
                return redis.follow()
            case Action.MOVE_SLOT:
                return redis.move(pick)
        return True


def _kill_one(up: Sequence[Member], of: Callable[[Member], list[int]], where: float) -> str:
    """Kills one process of those workers that have any."""
    found = [(member, pid) for member in up if member.is_ready for pid in of(member)]
    chosen = _pick(found, where)
    if chosen is None:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(chosen[1], signal.SIGKILL)
    return f"of {chosen[0].name}"


def _pick(choices: Sequence[T], where: float) -> T | None:
    return choices[int(where * len(choices))] if choices else None
