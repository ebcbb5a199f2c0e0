"""Twenty models on one device that has memory for five: which are loaded, and how long jobs wait.

    python -m benchmarks.scheduling.multiplexing --json multiplexing.json

Jobs come by a Poisson process, and their models by Zipf's law. In virtual time the worker's own
scheduler and choice of what makes room are held against the rule of Ray Serve's `multiplexed`: jobs
in the order in which they came, each batch with all that wait for the same model, and the model
that was used least recently makes room. A real worker plays one of the loads, with models that
sleep for as long as the simulated ones take. Then a class with such models shares the device with
one that has a single model, which is loaded: how much device time each has, loads included.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from celery import Celery

from batchery_worker.batching.residency import DeviceModels, HeldModel, choose_victims
from batchery_worker.batching.scheduler import ONE_CLASS
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from batchery_worker.job import USUAL_LANE, Lane, Limits
from batchery_worker.simulator.engine import Fleet, ServiceTime, Simulation, VirtualDevice
from batchery_worker.simulator.outcome import Sent, percentile
from batchery_worker.simulator.policies import (
    FixedBatcher,
    Policy,
    RealScheduler,
    SimulatedBatch,
)
from batchery_worker.simulator.workload import MS_PER_S, Arrival, poisson_times
from benchmarks.hardware import hardware, write_report
from benchmarks.queue.systems import CELERY, WORKER
from benchmarks.scheduling.sleeping_models import BATCH_SIZE
from benchmarks.venvs import ROOT

MODELS, ROOM = 20, 5
NAMES = [f"model{number:02}" for number in range(MODELS)]

LOAD_S = 1.0
SERVICE = ServiceTime(pass_ms=20.0, item_ms=1.0)

#: Jobs per second; and of the load that a real worker plays, for how long.
RATES = (5, 20, 100, 400)
SIMULATED_S = 600.0
REAL_RATE, REAL_S = 20, 60.0

#: Models of the first class, and jobs per second of both.
CLASS_LOADS = ((MODELS, 400, 600), (6, 400, 600), (MODELS, 100, 100))
MANY, ONE = "many", "one"

#: How long the worker may take for anything, in seconds.
TIMEOUT_S = 120.0

Figures = dict[str, Any]


def make_arrivals(
    rate_per_s: float,
    seconds: float,
    seed: int = 1,
    names: Sequence[str] = NAMES,
    lane: Lane = USUAL_LANE,
) -> list[Arrival]:
    """Jobs of one item: the n-th model gets 1/n as many as the first."""
    random = Random(seed)
    weights = list(accumulate(1 / (number + 1) for number in range(len(names))))
    made: list[Arrival] = []
    for time_s in poisson_times(rate_per_s, random):
        if time_s > seconds:
            return made
        (name,) = random.choices(names, cum_weights=weights)
        made.append(Arrival(time_s, name, lane))
    return made


class Memory:
    """What a device has loaded, in virtual time."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self.used_s: dict[str, float] = {}
        self.loads = self.batches = self.jobs = self.warm_jobs = 0

    def take(self, task: str, jobs: int, now_s: float, wanted: frozenset[str]) -> float:
        """Has a model there; returns how long that takes, in seconds."""
        self.batches += 1
        self.jobs += jobs
        is_warm = task in self.used_s
        if not is_warm:
            self.loads += 1
            held = [
                HeldModel(name, 1, LOAD_S, now_s - used_s, name in wanted)
                for name, used_s in self.used_s.items()
            ]
            for name in choose_victims(held, max(0, len(held) + 1 - self._room)) or ():
                del self.used_s[name]
        self.warm_jobs += jobs * is_warm
        load_s = 0.0 if is_warm else LOAD_S
        self.used_s[task] = now_s + load_s
        return load_s


class LoadingScheduler(RealScheduler):
    """The worker's scheduler, where batches may have to load their model first."""

    takes_urgent = False

    #: How long the model of the batch was loaded that ends next, in seconds.
    load_s = 0.0

    def ended(self, batch: SimulatedBatch, run_s: float | None, load_s: float = 0.0) -> None:
        """Notes that a batch is back, and charges its load."""
        super().ended(batch, run_s, load_s or self.load_s)

    def list_tasks(self) -> frozenset[str]:
        """The models for which jobs wait."""
        return frozenset(key.task for key in self._queues)


class PooledScheduler(LoadingScheduler):
    """The same for one device."""

    def __init__(self, shares: Mapping[str, float] = ONE_CLASS) -> None:
        super().__init__(shares)
        self.models = DeviceModels()
        self.report({})

    def next_batch(self, *arguments: Any, **options: Any) -> SimulatedBatch | None:
        """The batch that the device should get now."""
        batch = super().next_batch(*arguments, **options, models=self.models)
        if batch is not None:
            self.models.begin(batch.jobs[0].key.task, arguments[2])
        return batch

    def report(self, loaded: dict[str, float]) -> None:
        """Notes what is loaded."""
        states = {name: 0.0 if name in loaded else LOAD_S for name in [*NAMES, ONE]}
        self.models.report(states)


class RayMultiplexed(FixedBatcher):
    """Jobs in the order in which they came, those of one model together."""

    def __init__(self) -> None:
        super().__init__(BATCH_SIZE, 0.0)


class MultiplexedSimulation(Simulation):
    """One device, whose batches take longer if their model is not there."""

    def __init__(self, policy: Policy) -> None:
        fleet = Fleet(1, SERVICE)
        super().__init__(policy, fleet, Limits(BATCH_SIZE))
        self.memory = Memory()
        self._scheduler = policy if isinstance(policy, PooledScheduler) else None
        self._load_s = 0.0
        #: When a batch was back, its class, how long it computed, and how long its model loaded.
        self.ran: list[tuple[float, str, float, float]] = []

    def _begin(self, device: VirtualDevice) -> None:
        jobs = device.batches[0].batch.jobs
        task, scheduler = jobs[0].key.task, self._scheduler
        waiting = scheduler.list_tasks() if scheduler else frozenset()
        self._load_s = self.memory.take(task, len(jobs), self._now_s, waiting)
        if scheduler and self._load_s:
            scheduler.models.end_load(task, self._now_s + self._load_s)
            scheduler.report(self.memory.used_s)
        super()._begin(device)

    def _find_service(self, batch: SimulatedBatch) -> ServiceTime:
        service = super()._find_service(batch)
        return replace(service, pass_ms=service.pass_ms + self._load_s * MS_PER_S)

    def _came_back(self, device: VirtualDevice, sent: Sent, had_s: float, ran_s: float) -> None:
        if self._scheduler:
            self._scheduler.load_s = self._load_s
        name = sent.batch.jobs[0].lane.priority_class
        self.ran.append((self._now_s, name, had_s - self._load_s, self._load_s))
        super()._came_back(device, sent, had_s - self._load_s, ran_s)


POLICIES: dict[str, Callable[[], Policy]] = {"batchery": PooledScheduler, "ray": RayMultiplexed}


def simulate(policy: str, arrivals: Sequence[Arrival]) -> Figures:
    """Plays jobs in virtual time."""
    simulation = MultiplexedSimulation(POLICIES[policy]())
    run = simulation.run(arrivals)
    latencies_s = sorted(each for lane in run.lanes.values() for each in lane.latencies_s)
    memory = simulation.memory
    return {
        "policy": policy,
        "jobs": len(latencies_s),
        "seconds": round(run.end_s, 1),
        "loads": memory.loads,
        "batches": memory.batches,
        "warm_jobs": round(memory.warm_jobs / memory.jobs, 4),
        **describe(latencies_s),
    }


def simulate_classes(models: int, many_per_s: float, one_per_s: float) -> Iterator[Figures]:
    """Two classes of equal shares, of which one has many models; a row for each."""
    many = make_arrivals(many_per_s, SIMULATED_S, 1, NAMES[:models], Lane(MANY))
    one = make_arrivals(one_per_s, SIMULATED_S, 2, [ONE], Lane(ONE))
    simulation = MultiplexedSimulation(PooledScheduler({MANY: 50.0, ONE: 50.0}))
    run = simulation.run(sorted([*many, *one], key=lambda each: each.time_s))
    for name, rate in ((MANY, many_per_s), (ONE, one_per_s)):
        own = [each for each in simulation.ran if each[0] < SIMULATED_S and each[1] == name]
        computing_s, loading_s = sum(each[2] for each in own), sum(each[3] for each in own)
        yield {
            "class": name,
            "models": models if name == MANY else 1,
            "jobs_per_s": rate,
            "computing": round(computing_s / SIMULATED_S, 4),
            "loading": round(loading_s / SIMULATED_S, 4),
            **describe(sorted(run.lanes[Lane(name)].latencies_s)),
        }


def describe(latencies_s: Sequence[float]) -> Figures:
    """Percentiles of sorted latencies, in ms."""
    found = {name: percentile(latencies_s, share) for name, share in PERCENTILES.items()}
    return {name: round((value or 0.0) * MS_PER_S) for name, value in found.items()}


PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}


def play(arrivals: Sequence[Arrival]) -> Figures:
    """Plays jobs on a real worker, whose models sleep."""
    with EmbeddedRedis() as server:
        python = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        module = "benchmarks.scheduling.sleeping_models"
        worker = GuardedProcess(
            [sys.executable, "-W", "ignore", *CELERY, module, *WORKER, "-c", "1"],
            grace_s=10.0,
            environment={
                **os.environ,
                "PYTHONPATH": python,
                "SLEEPING_URL": server.url,
                "SLEEPING_MODELS": str(MODELS),
                "SLEEPING_LOAD_S": str(LOAD_S),
                "SLEEPING_PASS_S": str(SERVICE.pass_ms / MS_PER_S),
                "SLEEPING_ITEM_S": str(SERVICE.item_ms / MS_PER_S),
                "BATCHERY_DEVICES": "cpu",
                "BATCHERY_MODEL_MEMORY_BYTES": str(ROOM),
            },
            keep_open=(server.lifeline,),
        )
        client = Celery("client", broker=server.url, backend=server.url, set_as_current=False)
        try:
            return measure(client, arrivals)
        finally:
            client.close()
            worker.stop(10.0)


def measure(client: Celery, arrivals: Sequence[Arrival]) -> Figures:
    """Sends jobs at their times, and waits for their results."""
    client.send_task("model00", [0], queue="model00").get(timeout=TIMEOUT_S)
    before, began_s, jobs = ask_models(client), time.time(), []
    for each in arrivals:
        time.sleep(max(0.0, began_s + each.time_s - time.time()))
        jobs.append((each, client.send_task(each.task, [0], queue=each.task)))
    # What fails raises here.
    ended_s = [job.get(timeout=TIMEOUT_S) for _, job in jobs]
    latencies_s = sorted(
        end_s - began_s - each.time_s for (each, _), end_s in zip(jobs, ended_s, strict=True)
    )
    after = ask_models(client)
    return {
        "policy": "batchery, a real worker",
        "jobs": len(jobs),
        "seconds": round(max(ended_s) - began_s, 1),
        "loads": after["loads"] - before["loads"],
        "batches": after["batches"] - before["batches"],
        **describe(latencies_s),
    }


def ask_models(client: Celery) -> dict[str, int]:
    """How many loads and batches a worker has counted."""
    answers = client.control.broadcast("batchery", reply=True, timeout=5.0, limit=1)
    (figures,) = (answer for each in answers or () for answer in each.values())
    devices = figures["devices"].values()
    loads = sum(model["loads"] for device in devices for model in device["models"].values())
    return {"loads": loads, "batches": figures["batches"]["batches"]}


def main() -> None:
    """Runs it; see above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--simulated", action="store_true", help="no real worker")
    options = parser.parse_args()
    rows: list[Figures] = []
    for rate, seconds in [*((rate, SIMULATED_S) for rate in RATES), (REAL_RATE, REAL_S)]:
        arrivals = make_arrivals(rate, seconds)
        rows += [{"jobs_per_s": rate, **simulate(policy, arrivals)} for policy in POLICIES]
    if not options.simulated:
        rows.append({"jobs_per_s": REAL_RATE, **play(arrivals)})
    classes = [row for loads in CLASS_LOADS for row in simulate_classes(*loads)]
    for row in [*rows, *classes]:
        print(json.dumps(row))
    setup = {"models": MODELS, "room": ROOM, "load_s": LOAD_S, "batch_size": BATCH_SIZE}
    service = {"pass_ms": SERVICE.pass_ms, "item_ms": SERVICE.item_ms}
    report = {"hardware": hardware(), **setup, **service, "rows": rows, "classes": classes}
    write_report(options.json, report)


if __name__ == "__main__":
    main()
