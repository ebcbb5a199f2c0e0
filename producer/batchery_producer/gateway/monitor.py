"""What workers, devices and queues do: collected only while somebody asks, for page and metrics."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from celery import Celery
from pydantic import BaseModel, Field

from batchery.cli.survey import FirstSeen, Survey, survey
from batchery.protocol.figures import BatchSums, WorkerFigures, divide
from batchery_producer.gateway.health import Health, stop
from batchery_producer.gateway.problems import REDIS_AWAY, Kind, Problem, logger, redis_log_pace

Share = float | None


class ThroughputStatus(BaseModel):
    """What all workers together did in the last seconds."""

    items_per_s: float
    jobs_per_s: float
    tokens_per_s: float


class QueueStatus(BaseModel):
    """What waits in a queue."""

    name: str
    waiting: int = Field(description="Jobs in Redis, and those that workers took and have not run.")
    in_workers: int = Field(description="Those of them that workers took.")
    oldest_s: float | None = Field(description="Age of the oldest; null if none, or unknown.")


class DeviceStatus(BaseModel):
    """A device: in the last seconds, and since its worker started."""

    worker: str
    name: str
    state: str
    batches_in_flight: int
    items_per_s: float | None
    busy: Share = Field(description="Share of the time that went into forward passes.")
    batch_size: float | None = Field(description="Items per batch, in the last seconds.")
    mean_batch_size: float | None = Field(description="The same since the worker started.")
    padding_waste: Share = Field(description="Share of padding in the tokens, in the last seconds.")
    mean_padding_waste: Share = Field(description="The same since the worker started.")
    resident_bytes: int | None = Field(description="Main memory of its process.")
    memory_bytes: int | None = Field(description="Memory that torch holds of a GPU.")
    memory_size_bytes: int | None = Field(description="All memory of the GPU.")


class FailureStatus(BaseModel):
    """Jobs, or items of jobs, that failed for one reason since the workers started."""

    error: str
    count: int


class ModelStatus(BaseModel):
    """A model of the settings."""

    name: str
    kind: str
    queue: str
    aliases: list[str]


class StatusResponse(BaseModel):
    """Everything that the page shows."""

    problem: str | None = Field(description="Why nothing is known now; null if it is known.")
    age_s: float = Field(description="How old these figures are.")
    workers: int = Field(description="Workers with devices that answered.")
    notes: list[str] = Field(description="Workers that did not answer, or run no batches.")
    throughput: ThroughputStatus | None = Field(description="Null in the first second.")
    jobs: int = Field(description="Jobs that ran since the workers started.")
    items: int = Field(description="Items that ran since the workers started.")
    queues: list[QueueStatus]
    devices: list[DeviceStatus]
    failures: list[FailureStatus]
    dead_letters: int | None
    models: list[ModelStatus]


def overview(
    now: Survey | None, before: Survey | None, models: list[ModelStatus], problem: str, age_s: float
) -> StatusResponse:
    """The figures of a survey.

    Args:
        now: The survey; None if there is none.
        before: One a few seconds earlier; None if there is none.
        models: Those of the settings.
        problem: Why there is no survey; empty if there is one.
        age_s: How old it is, in seconds.
    """
    known = now or Survey({}, {})
    batches = [figures.batches for figures in known.figures.values()]
    return StatusResponse(
        problem=problem or None,
        age_s=round(age_s, 3),
        workers=len(batches),
        notes=[f"{name}: {why}" for name, why in known.problems(before).items()],
        throughput=_throughput(known, before),
        jobs=sum(each.jobs for each in batches),
        items=sum(each.items for each in batches),
        queues=list(list_queues(known)),
        devices=list(list_devices(known, before)),
        failures=[
            FailureStatus(error=error, count=count)
            for error, count in count_failures(known).most_common()
        ],
        dead_letters=known.dead_letters,
        models=models,
    )


def list_queues(survey: Survey) -> Iterator[QueueStatus]:
    """What waits in each queue, by name, be it in Redis or in a worker."""
    names = set(survey.queues)
    in_workers: Counter[str] = Counter()
    ages_s: dict[str, list[float]] = {}
    for figures in survey.figures.values():
        for name, waiting in figures.waiting_by_queue.items():
            in_workers[name] += waiting.jobs
            ages_s.setdefault(name, []).append(waiting.oldest_s)
    for name in sorted(names | set(in_workers) - {""}):
        in_redis_s = survey.oldest_s.get(name)
        ages = ages_s.get(name, []) + ([] if in_redis_s is None else [in_redis_s])
        yield QueueStatus(
            name=name,
            waiting=survey.queues.get(name, 0) + in_workers[name],
            in_workers=in_workers[name],
            oldest_s=round(max(ages), 3) if ages else None,
        )


def list_devices(now: Survey, before: Survey | None = None) -> Iterator[DeviceStatus]:
    """The devices of all workers that answered."""
    for worker, figures in now.figures.items():
        gained = now.since(worker, before)
        for name, device in figures.devices.items():
            lately = gained.devices.get(name) if gained is not None else None
            done = lately.done if lately is not None else BatchSums()
            seconds = gained.clock_s if gained is not None and lately is not None else None
            resident_kib = device.resident_kib
            yield DeviceStatus(
                worker=worker,
                name=name,
                state=device.state,
                batches_in_flight=device.batches_in_flight,
                items_per_s=divide(done.items, seconds),
                # A pass that began before the first survey counts as a whole.
                busy=min(1.0, round(done.forward_ms / 1e3 / seconds, 3)) if seconds else None,
                batch_size=done.mean_batch_size,
                mean_batch_size=device.done.mean_batch_size,
                padding_waste=done.padding_waste,
                mean_padding_waste=device.done.padding_waste,
                resident_bytes=None if resident_kib is None else resident_kib * 1024,
                memory_bytes=device.memory.reserved_bytes,
                memory_size_bytes=device.memory.total_bytes,
            )


def count_failures(survey: Survey) -> "Counter[str]":
    """How many jobs and items failed, by class of the error."""
    failed: Counter[str] = Counter()
    for figures in survey.figures.values():
        failed.update(figures.batches.failures)
    return failed


def _throughput(now: Survey, before: Survey | None) -> ThroughputStatus | None:
    gained = [each for name in now.figures if (each := now.since(name, before)) is not None]
    if not gained:
        return None
    return ThroughputStatus(
        items_per_s=_rate([(each.batches.items, each.clock_s) for each in gained]),
        jobs_per_s=_rate([(each.batches.jobs, each.clock_s) for each in gained]),
        tokens_per_s=_rate([(each.batches.tokens, each.clock_s) for each in gained]),
    )


def _rate(counts: Iterable[tuple[int, float]]) -> float:
    """Of all workers together, each by its own clock."""
    return round(sum(count / seconds for count, seconds in counts), 3)


# Surveys


#: What callers get to know of a survey that failed. The log has the reason, which may name hosts.
UNSEEN = "workers and queues cannot be looked at; the gateway's log says why"

#: Seconds between two surveys.
INTERVAL_S = 1.0

#: How long the workers may take to answer one, in seconds.
ANSWER_TIMEOUT_S = 1.0

#: How often those who wait for a survey look whether Redis answers, in seconds.
SILENCE_CHECK_S = 0.1

#: For how long surveys go on after the last question, in seconds.
IDLE_S = 10.0

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
    """Surveys workers and queues once a second, however many ask, and not at all if nobody does."""

    def __init__(self, app: Celery, queues: Collection[str], health: Health | None = None) -> None:
        """Starts nothing yet.

        Args:
            app: Its workers and its broker are asked.
            queues: Names of queues that are looked into even if no worker consumes them.
            health: Knows whether Redis answers; if it does not, nobody waits for a survey.
        """
        self._health = health
        # Of its own: threads that others share may all wait for Redis.
        self._thread = ThreadPoolExecutor(1, "batchery-monitor")
        self._app = app
        self._queues = queues
        self._first_seen = FirstSeen()
        self._kept: deque[Survey] = deque(maxlen=KEPT_SURVEYS)
        self._asked_s = 0.0
        self._watching: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._look: ClusterSnapshot | None = None
        #: Number of surveys so far.
        self.surveys = 0

    async def latest(self) -> ClusterSnapshot:
        """The last look; the first one after a pause takes about a second, also without Redis."""
        self._asked_s = time.monotonic()
        if self._watching is None or self._watching.done():
            self._look = None
            self._first = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._watch(self._first))
            if self._health is not None:
                self._health.look_soon()
        while self._look is None and self._first is not None and not self._is_silent():
            # A caller who hangs up does not cancel it for the others.
            await asyncio.wait({self._first}, timeout=SILENCE_CHECK_S)
        if self._look is None or self._is_silent():
            return ClusterSnapshot(None, None, REDIS_AWAY, time.monotonic())
        return self._look

    def _is_silent(self) -> bool:
        return self._health is not None and self._health.is_silent

    async def workers(self) -> Mapping[str, WorkerFigures]:
        """The figures of each worker with devices.

        Raises:
            Problem: Redis is away.
        """
        look = await self.latest()
        if look.now is None:
            raise Problem(Kind.UNAVAILABLE, look.problem, retry_after_s=INTERVAL_S)
        return look.now.figures

    async def close(self) -> None:
        """Stops the surveys."""
        if self._watching is not None:
            await stop(self._watching)

    async def _watch(self, first: "asyncio.Future[None]") -> None:
        self._kept.clear()
        while time.monotonic() - self._asked_s < IDLE_S:
            began_s = time.monotonic()
            self._look = await self._survey()
            if not first.done():
                first.set_result(None)
            await asyncio.sleep(max(0.0, began_s + INTERVAL_S - time.monotonic()))

    async def _survey(self) -> ClusterSnapshot:
        self.surveys += 1
        try:
            ask = partial(survey, self._app, ANSWER_TIMEOUT_S, self._queues)
            found = await asyncio.get_running_loop().run_in_executor(self._thread, ask)
            now = self._first_seen.date(found)
        except Exception as error:  # noqa: BLE001 - whoever watches must see it, and see it mended
            if redis_log_pace.is_due(str(error)):
                logger.warning("%s: %s", type(error).__name__, error)
            self._kept.clear()
            return ClusterSnapshot(None, None, UNSEEN, time.monotonic())
        before = self._kept[0] if self._kept else None
        self._kept.append(now)
        return ClusterSnapshot(now, before, "", time.monotonic())
