"""The figures of a worker, made of those of its devices' processes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

from batchery.protocol.figures import (
    BatchFigures,
    BatchSums,
    LeaseFigures,
    add,
    read_figures,
    report,
)
from batchery_worker.device_pool.process import DeviceProcess

#: What a worker knows better of a device than that itself.
OF_PROCESS = ("state", "error", "pid", "load_s", "resident_kib")


def merge(
    found: Sequence[Mapping[str, Any]],
    devices: Sequence[DeviceProcess],
    past: Mapping[str, Any] | None,
    restarts: int,
    recovered: int,
) -> dict[str, Any]:
    """The figures of a worker, made of those of its devices.

    Args:
        found: Of each device's process.
        devices: All of them.
        past: What earlier processes have counted.
        restarts: Number of deaths.
        recovered: How many messages of dead holders are back in their queues.
    """
    whole = add_up([*found, past] if past else found)
    for device in devices:
        known = whole["devices"].get(device.name, {"done": report(BatchSums())})
        own = device.figures()
        whole["devices"][device.name] = {**own, **known, **{key: own[key] for key in OF_PROCESS}}
    whole["batches"]["device_restarts"] += restarts
    whole["leases"]["recovered"] += recovered
    return whole


def add_up(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adds figures of devices; of several of the same device, the first ones are current."""
    batches, leases, total = BatchFigures(), LeaseFigures(), Counter[str]()
    costs: dict[str, Any] = {}
    devices: dict[str, Any] = {}
    done: dict[str, BatchSums] = {}
    by_queue: dict[str, Any] = {}
    oldest_s: list[float] = []
    for each in found:
        read = read_figures(each)
        if read is None:
            continue
        batches = add(batches, read.batches)
        leases = add(leases, read.leases)
        total.update(each["total"])
        costs = {**each["costs"], **costs}
        devices = {**each["devices"], **devices}
        for name, device in read.devices.items():
            done[name] = add(done.get(name, BatchSums()), device.done)
        if read.oldest_waiting_s is not None:
            oldest_s.append(read.oldest_waiting_s)
        for queue, waiting in each["waiting_by_queue"].items():
            known = by_queue.setdefault(queue, {"jobs": 0, "oldest_s": 0.0})
            known["jobs"] += waiting["jobs"]
            known["oldest_s"] = max(known["oldest_s"], waiting["oldest_s"])
    return {
        "devices": {name: {**devices[name], "done": report(sums)} for name, sums in done.items()},
        "costs": costs,
        "clock_s": round(monotonic(), 3),
        "waiting": sum(each["waiting"] for each in found),
        "oldest_waiting_s": max(oldest_s, default=None),
        "waiting_by_queue": by_queue,
        "batches": report(batches),
        "leases": report(leases),
        "total": dict(total),
    }


def without_jobs(figures: Mapping[str, Any]) -> dict[str, Any]:
    """What a process had counted that has ended: it holds nothing any more."""
    nothing: dict[str, Any] = {"waiting": 0, "oldest_waiting_s": None, "waiting_by_queue": {}}
    return {**figures, **nothing, "leases": {**figures["leases"], "held": 0}}
