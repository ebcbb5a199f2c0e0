"""The devices of a queue, from what their workers say."""

from collections.abc import Mapping
from typing import Any, NamedTuple

#: Bytes of what these routes call a GB, as torch's users count.
GB = 2**30


class DeviceFigures(NamedTuple):
    """The devices that serve a queue.

    Attributes:
        names: Of those that are ready, each once, sorted.
        allocated_bytes: Memory that tensors hold on all of them; None if no device counts it, as
            on a CPU.
        peak_bytes: Maximum that they held.
    """

    names: tuple[str, ...] = ()
    allocated_bytes: int | None = None
    peak_bytes: int | None = None


def read_figures(workers: Mapping[str, Mapping[str, Any]], queue: str) -> DeviceFigures:
    """Reads the figures of all workers.

    Args:
        workers: By name, as from `celery inspect batchery`.
        queue: Workers that do not consume it are left out.
    """
    ready = [
        (name, device)
        for worker in workers.values()
        if queue in worker.get("queues", ())
        for name, device in worker.get("devices", {}).items()
        if device.get("state") == "ready"
    ]
    memory = [device["memory"] for _, device in ready if device.get("memory")]
    return DeviceFigures(
        tuple(sorted({name for name, _ in ready})),
        sum(each["allocated_bytes"] for each in memory) if memory else None,
        sum(each["peak_bytes"] for each in memory) if memory else None,
    )


def in_gb(size_bytes: int | None) -> float | None:
    """A size in GB; None for none."""
    return None if size_bytes is None else round(size_bytes / GB, 3)
