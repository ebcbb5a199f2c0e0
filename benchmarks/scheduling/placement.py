"""Eight devices, three models and a demand that shifts: how much of the devices' time is used.

    python -m benchmarks.scheduling.placement --json placement.json

Jobs come by a Poisson process; which models they are for changes from phase to phase. Each device
has memory for one model, or for two, and loads another one by the worker's own rules, in virtual
time. That is held against the best placement known afterwards: in each phase the whole numbers of
devices that get most done in full batches, changed at once and for nothing; where a device has
memory for two models, as if it had it for all. A fixed placement is the best one for the demand of
all phases together. A real worker plays one of the demands, with models that sleep.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from celery import Celery
from redis import Redis
from rich.console import Console

from batchery_worker.batching.residency import DeviceModels
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from batchery_worker.job import USUAL_LANE, Limits
from batchery_worker.simulator.engine import (
    DeviceLine,
    Fleet,
    ServiceTime,
    Simulation,
    VirtualDevice,
)
from batchery_worker.simulator.outcome import Sent
from batchery_worker.simulator.policies import SimulatedBatch
from batchery_worker.simulator.workload import MS_PER_S, Arrival, poisson_times
from benchmarks.hardware import hardware
from benchmarks.queue.systems import CELERY, WORKER
from benchmarks.scheduling.messages import Template, body_of
from benchmarks.scheduling.multiplexing import LoadingScheduler, Memory, ask_models, describe
from benchmarks.scheduling.playing import Call, Played, Player
from benchmarks.scheduling.sleeper import capture_message
from benchmarks.scheduling.sleeping_models import BATCH_SIZE
from benchmarks.venvs import ROOT

DEVICES = 8
MODELS = ("model00", "model01", "model02")

#: How many models a device has memory for.
ROOMS = (1, 2)

LOAD_S = 1.0
SERVICE = ServiceTime(pass_ms=240.0, item_ms=12.0)

#: Device time of an item in a full batch, in seconds.
ITEM_S = SERVICE.seconds(BATCH_SIZE) / BATCH_SIZE

#: Jobs that come, as a share of what all devices compute in full batches.
LOADS = (0.9, 1.2)

#: Length of a phase in seconds; of one that a real worker plays.
PHASE_S, REAL_PHASE_S = 60.0, 30.0

#: How long the worker may take for anything, in seconds.
TIMEOUT_S = 120.0

OURS, BEST, FIXED = "batchery", "best", "fixed"

Figures = dict[str, Any]

#: How many devices a model has, by its name.
Split = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Demand:
    """Jobs of all models, phase by phase."""

    name: str
    #: The share of each model in each phase.
    phases: Sequence[tuple[float, ...]]
    phase_s: float = PHASE_S

    @property
    def seconds(self) -> float:
        """Until the last phase is over."""
        return len(self.phases) * self.phase_s

    def make_arrivals(self, load: float, seed: int = 1) -> list[Arrival]:
        """Jobs of one item."""
        random = Random(seed)
        made: list[Arrival] = []
        for time_s in poisson_times(load * DEVICES / ITEM_S, random):
            if time_s >= self.seconds:
                return made
            shares = self.phases[int(time_s // self.phase_s)]
            (name,) = random.choices(MODELS, shares)
            made.append(Arrival(time_s, name, USUAL_LANE))
        return made

    def sum_work(self, arrivals: Sequence[Arrival]) -> list[dict[str, float]]:
        """The device time that the jobs of each model need, by phase, in seconds."""
        work_s = [dict.fromkeys(MODELS, 0.0) for _ in self.phases]
        for each in arrivals:
            work_s[int(each.time_s // self.phase_s)][each.task] += ITEM_S
        return work_s


TURNING = ((0.6, 0.3, 0.1), (0.1, 0.6, 0.3), (0.3, 0.1, 0.6))

DEMANDS = (
    Demand("turns every minute", TURNING),
    Demand("one step", ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6), (0.1, 0.3, 0.6))),
)
REAL_DEMAND = Demand("turns every half minute", TURNING, REAL_PHASE_S)


@dataclass(frozen=True, slots=True)
class Phase:
    """The best that can be made of a phase."""

    split: Split
    #: Device time that is used in full batches, in seconds: with one model on each device, and if
    #: all devices had all models.
    work_s: float
    shared_s: float


def find_best(work_s: Sequence[Mapping[str, float]], seconds: float) -> list[Phase]:
    """The splits of the devices that get most done in each phase.

    Args:
        work_s: What comes in each phase, by model, in seconds of device time.
        seconds: Length of each.
    """
    chosen: list[Phase] = []
    all_left_s = 0.0
    left_s = dict.fromkeys(MODELS, 0.0)
    for comes_s in work_s:
        waits_s = {name: left_s[name] + comes_s[name] for name in MODELS}

        def rate(split: Split, waits_s: Mapping[str, float] = waits_s) -> tuple[float, float]:
            """What is done; then how much time the busiest ones have to spare."""
            left_s = [waits_s[name] - split[name] * seconds for name in MODELS]
            return -sum(max(0.0, each_s) for each_s in left_s), -max(left_s)

        best = max(list_splits(), key=rate)
        left_s = {name: max(0.0, waits_s[name] - best[name] * seconds) for name in MODELS}
        all_waits_s = all_left_s + sum(comes_s.values())
        shared_s = min(all_waits_s, DEVICES * seconds)
        all_left_s = all_waits_s - shared_s
        chosen.append(Phase(best, sum(waits_s.values()) - sum(left_s.values()), shared_s))
    return chosen


def list_splits() -> Iterator[Split]:
    """All ways to give each device one model."""
    for counts in product(range(DEVICES + 1), repeat=len(MODELS)):
        if sum(counts) == DEVICES:
            yield dict(zip(MODELS, counts, strict=True))


class PlacedScheduler(LoadingScheduler):
    """The worker's scheduler, for devices that have not loaded the same models."""

    def __init__(self) -> None:
        super().__init__()
        fleet: list[DeviceModels] = []
        self.devices = [DeviceModels(fleet=fleet) for _ in range(DEVICES)]
        #: Number of the device that the next batch is for, and when it was asked last.
        self.asking = 0
        self._asked_s = 0.0

    def next_batch(self, *arguments: Any, **options: Any) -> SimulatedBatch | None:
        """The batch that the device should get now."""
        models, self._asked_s = self.devices[self.asking], arguments[2]
        batch = super().next_batch(*arguments, **options, models=models)
        if batch is not None:
            models.begin(batch.jobs[0].key.task, self._asked_s)
        return batch

    def wake_s(self) -> float | None:
        """When a device may load a model."""
        times_s = (each.wake_s for each in self.devices if each.wake_s > self._asked_s)
        return min(times_s, default=None)


class PlacedSimulation(Simulation):
    """Devices with memory for some models; or with a placement, whose models are all loaded."""

    def __init__(self, room: int, splits: Sequence[Split] = (), phase_s: float = 0.0) -> None:
        """Starts as a worker does: with the first models on all devices.

        Args:
            room: Number of models that a device has memory for.
            splits: How many devices each model has, phase by phase; empty for the worker's rules.
            phase_s: Length of a phase.
        """
        scheduler = PlacedScheduler()
        super().__init__(scheduler, Fleet(DEVICES, SERVICE), Limits(BATCH_SIZE))
        self._scheduler = scheduler
        self._load_s = 0.0
        #: How long devices have loaded for what they run, by their numbers, in seconds.
        self._loads_s: dict[int, float] = {}
        self.memories = [Memory(len(MODELS) if splits else room) for _ in range(DEVICES)]
        #: When a batch was back, its items, and how long it was computed.
        self.ran: list[tuple[float, int, float]] = []
        for memory, models in zip(self.memories, scheduler.devices, strict=True):
            memory.used_s = dict.fromkeys(MODELS if splits else MODELS[:room], 0.0)
            self._report(models, memory)
        for number, split in enumerate(splits):
            self.call_at(number * phase_s, partial(self._place, split))

    def _place(self, split: Split, _: float) -> None:
        places = [name for name in MODELS for _ in range(split[name])]
        for name, models in zip(places, self._scheduler.devices, strict=True):
            models.elsewhere = frozenset(MODELS) - {name}

    def _report(self, models: DeviceModels, memory: Memory) -> None:
        models.report({name: 0.0 if name in memory.used_s else LOAD_S for name in MODELS})

    def _give_out(self, line: DeviceLine) -> VirtualDevice | None:
        """As the dispatcher: a device for which nothing is there is passed over."""
        held = int(line is self._busy)
        passed: dict[int, VirtualDevice] = {}
        while devices := [
            each
            for each in self._devices
            if each.is_open and len(each.batches) == held and each.number not in passed
        ]:
            device = min(devices, key=lambda each: (held and each.began_s, each.number))
            self._scheduler.asking = device.number
            left_s = self._left_s(device)
            batch = self._scheduler.next_batch(held, False, self._now_s, 0, (), left_s)
            if batch is None:
                passed[device.number] = device
                continue
            device.batches.append(self._sent(batch))
            if not held:
                self._begin(device)
        return next(iter(passed.values()), None)

    def _begin(self, device: VirtualDevice) -> None:
        jobs = device.batches[0].batch.jobs
        memory, models = self.memories[device.number], self._scheduler.devices[device.number]
        waiting = self._scheduler.list_tasks()
        self._load_s = memory.take(jobs[0].key.task, len(jobs), self._now_s, waiting)
        self._loads_s[device.number] = self._load_s
        super()._begin(device)
        if self._load_s:
            # The batch begins after its load, and the next one comes towards its end.
            device.began_s = loaded_s = self._now_s + self._load_s
            device.is_open = False
            self._plan_end(device)

            def note(now_s: float) -> None:
                models.end_load(jobs[0].key.task, now_s)
                self._report(models, memory)

            self.call_at(loaded_s, note)

    def _find_service(self, batch: SimulatedBatch) -> ServiceTime:
        service = super()._find_service(batch)
        pass_ms = service.pass_ms + self._load_s * MS_PER_S
        return ServiceTime(pass_ms, service.item_ms)

    def _came_back(self, device: VirtualDevice, sent: Sent, had_s: float, ran_s: float) -> None:
        self._scheduler.load_s = self._loads_s.pop(device.number, 0.0)
        super()._came_back(device, sent, had_s, ran_s)
        self.ran.append((self._now_s, sent.batch.items, had_s))


@dataclass(slots=True)
class Tally:
    """What devices did until the last phase was over."""

    demand: Demand
    #: How long they computed, and how long full batches would have taken for the same.
    computing_s: float = 0.0
    work_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work_s = [0.0 for _ in self.demand.phases]

    def add(self, end_s: float, items: int, computed_s: float) -> None:
        """Counts items that were done at a time."""
        phase = int(end_s // self.demand.phase_s)
        if phase < len(self.work_s):
            self.computing_s += computed_s
            self.work_s[phase] += items * ITEM_S

    def compare(self, best_s: Sequence[float]) -> Figures:
        """As shares of the device time that the best placement uses in each phase."""
        phases = [own_s / each_s for own_s, each_s in zip(self.work_s, best_s, strict=True)]
        return {
            "best_s": round(sum(best_s), 1),
            "computing_s": round(self.computing_s, 1),
            "work_s": round(sum(self.work_s), 1),
            "computing_used": round(self.computing_s / sum(best_s), 4),
            "work_used": round(sum(self.work_s) / sum(best_s), 4),
            "work_used_by_phase": [round(each, 4) for each in phases],
            "jobs_per_s": round(sum(self.work_s) / ITEM_S / self.demand.seconds, 1),
        }


def find_bound(phases: Sequence[Phase], room: int) -> list[float]:
    """The device time that can be used in each phase, in seconds, by the memory of the devices."""
    return [each.work_s if room == 1 else each.shared_s for each in phases]


def simulate(demand: Demand, arrivals: Sequence[Arrival], room: int) -> dict[str, Figures]:
    """Plays jobs in virtual time, by each policy."""
    work_s = demand.sum_work(arrivals)
    total_s = {name: sum(each[name] for each in work_s) for name in MODELS}
    best = find_best(work_s, demand.phase_s)
    simulations = {OURS: PlacedSimulation(room)}
    if room == 1:
        splits = [phase.split for phase in best]
        (fixed,) = find_best([total_s], demand.seconds)
        simulations[BEST] = PlacedSimulation(room, splits, demand.phase_s)
        simulations[FIXED] = PlacedSimulation(room, [fixed.split])
    found = dict[str, Figures]()
    for name, simulation in simulations.items():
        run = simulation.run(arrivals)
        tally = Tally(demand)
        for each in simulation.ran:
            tally.add(*each)
        latencies_s = sorted(each for lane in run.lanes.values() for each in lane.latencies_s)
        found[name] = {
            "jobs": len(latencies_s),
            "seconds": round(run.end_s, 1),
            "loads": sum(memory.loads for memory in simulation.memories),
            **tally.compare(find_bound(best, room)),
            **describe(latencies_s),
        }
        if name == BEST:
            found[name]["splits"] = [list(phase.split.values()) for phase in best]
    return found


def play(demand: Demand, arrivals: Sequence[Arrival], room: int) -> Figures:
    """Plays jobs on a real worker, whose models sleep."""
    with run_worker(room) as client:
        url = client.conf.broker_url
        with Redis.from_url(url) as redis:
            message = capture_message(url, redis)
        # What the worker does for the first time is done then.
        client.send_task(MODELS[0], [0], queue=MODELS[0]).get(timeout=TIMEOUT_S)
        templates = {name: Template.of(message, name, name, is_stamped=True) for name in MODELS}
        body = body_of(0)
        calls = [Call(each.time_s, each.task, templates[each.task], body) for each in arrivals]
        before = ask_models(client)

        async def send() -> Played:
            async with Player(url) as player:
                return await player.play(calls)

        played = asyncio.run(send())
        after = ask_models(client)
    tally = Tally(demand)
    for call, heard in zip(calls, played.heard, strict=True):
        info = heard.info
        tally.add(call.due_s + heard.latency_s, 1, info["forward_ms"] / MS_PER_S / info["size"])
    return {
        "jobs": len(calls),
        "seconds": round(played.seconds, 1),
        "loads": after["loads"] - before["loads"],
        **tally.compare(find_bound(find_best(demand.sum_work(arrivals), demand.phase_s), room)),
        **describe(sorted(heard.latency_s for heard in played.heard)),
        "latest_ms": round(max(played.lags_s) * MS_PER_S),
    }


@contextmanager
def run_worker(room: int) -> Iterator[Celery]:
    """A worker with eight devices that sleep, and its Redis; both end with the block."""
    python = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with EmbeddedRedis() as server:
        worker = GuardedProcess(
            [
                *(sys.executable, "-W", "ignore", *CELERY),
                *("benchmarks.scheduling.sleeping_models", *WORKER, "-c", "1"),
            ],
            grace_s=10.0,
            environment={
                **os.environ,
                "PYTHONPATH": python,
                "SLEEPING_URL": server.url,
                "SLEEPING_MODELS": str(len(MODELS)),
                "SLEEPING_LOAD_S": str(LOAD_S),
                "SLEEPING_PASS_S": str(SERVICE.pass_ms / MS_PER_S),
                "SLEEPING_ITEM_S": str(SERVICE.item_ms / MS_PER_S),
                "BATCHERY_DEVICES": ",".join(f"cpu:{number}" for number in range(DEVICES)),
                "BATCHERY_MODEL_MEMORY_BYTES": str(room),
            },
            keep_open=(server.lifeline,),
        )
        client = Celery("client", broker=server.url, backend=server.url, set_as_current=False)
        try:
            yield client
        finally:
            client.close()
            worker.stop(10.0)


def list_runs(demands: Sequence[Demand], loads: Sequence[float]) -> Iterator[Figures]:
    """A row for each demand, load, room and policy in virtual time."""
    for demand, load in product(demands, loads):
        arrivals = demand.make_arrivals(load)
        for room in ROOMS:
            for policy, figures in simulate(demand, arrivals, room).items():
                place = {"demand": demand.name, "load": load, "room": room}
                yield {**place, "policy": policy, **figures}


def list_real_runs(demand: Demand, loads: Sequence[float]) -> Iterator[Figures]:
    """The same on a real worker, and in virtual time beside it."""
    for load in loads:
        arrivals = demand.make_arrivals(load)
        place = {"demand": demand.name, "load": load, "room": 1}
        for policy, figures in simulate(demand, arrivals, 1).items():
            yield {**place, "policy": policy, **figures}
        yield {**place, "policy": f"{OURS}, a real worker", **play(demand, arrivals, 1)}


def main() -> None:
    """Runs it; see above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--only", choices=["simulated", "real"], help="in virtual time, or not")
    parser.add_argument("--phase-s", type=float, help="length of all phases, in seconds")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="see LOADS")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    console.print(hardware())
    demands: Sequence[Demand] = DEMANDS
    real = REAL_DEMAND
    if options.phase_s:
        demands = tuple(Demand(each.name, each.phases, options.phase_s) for each in demands)
        real = Demand(real.name, real.phases, options.phase_s)
    runs = {
        "simulated": list_runs(demands, options.loads),
        "real": list_real_runs(real, options.loads),
    }
    rows: list[Figures] = []
    for name in [options.only] if options.only else runs:
        for row in runs[name]:
            console.print(json.dumps(row))
            rows.append(row)
    if options.json:
        setup = {"devices": DEVICES, "load_s": LOAD_S, "batch_size": BATCH_SIZE}
        service = {"pass_ms": SERVICE.pass_ms, "item_ms": SERVICE.item_ms}
        content = {"hardware": hardware(), **setup, **service, "rows": rows}
        options.json.write_text(f"{json.dumps(content, indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
