"""Ours: `batched`, with and without the lengths of items, and the engine."""

from typing import Any

from batchery import Engine, ModelSettings, batched
from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def plain(workload: Workload, batch_size: int) -> Entrance:
    """`batched`, with its defaults."""
    call = batched(workload.function, max_batch_size=batch_size)
    return Entrance(call, call.acall)


async def by_length(workload: Workload, batch_size: int) -> Entrance:
    """`batched` that sorts items, and cuts batches where that saves padding."""
    call = batched(workload.function, max_batch_size=batch_size, length=workload.length)
    return Entrance(call, call.acall)


async def engine(workload: Workload, batch_size: int) -> Entrance:
    """The worker's own forward pass."""
    settings = ModelSettings(kind="embedding", model=workload.model, max_batch_size=batch_size)
    running = await Engine(settings).__aenter__()

    async def acall(text: str) -> Any:
        return (await running(text))["vector"]

    return Entrance(acall=acall)


if __name__ == "__main__":
    main({"batched": plain, "length": by_length, "engine": engine})
