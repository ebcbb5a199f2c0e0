"""No batcher: every call by itself, side by side or one at a time."""

import asyncio
import threading
from typing import Any

from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def no_batching(workload: Workload, _: int) -> Entrance:
    """Threads call the function; coroutines have asyncio's own threads call it."""

    def call(item: Any) -> Any:
        return workload.function([item])[0]

    async def acall(item: Any) -> Any:
        return await asyncio.to_thread(call, item)

    return Entrance(call, acall)


async def lock(workload: Workload, _: int) -> Entrance:
    """The same, one call at a time."""
    mutex, async_mutex = threading.Lock(), asyncio.Lock()

    def call(item: Any) -> Any:
        with mutex:
            return workload.function([item])[0]

    async def acall(item: Any) -> Any:
        async with async_mutex:
            return (await asyncio.to_thread(workload.function, [item]))[0]

    return Entrance(call, acall)


if __name__ == "__main__":
    main({"no batching": no_batching, "lock": lock})
