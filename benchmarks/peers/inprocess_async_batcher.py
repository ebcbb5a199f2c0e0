"""async-batcher: an asyncio queue before a thread of asyncio's own; time-outs are its defaults."""

from typing import Any

from async_batcher.batcher import AsyncBatcher

from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def start(workload: Workload, batch_size: int) -> Entrance:
    """Starts with its first item."""

    class Batcher(AsyncBatcher[Any, Any]):
        """The workload as its method."""

        def process_batch(self, batch: list[Any]) -> Any:
            """Runs one batch."""
            return workload.function(batch)

    return Entrance(acall=Batcher(max_batch_size=batch_size).process)


if __name__ == "__main__":
    main({"process": start})
