"""mixedbread's `batched`: its thread, and its batcher for asyncio; time-outs are its defaults."""

from typing import Any

import batched

from benchmarks.peers.inprocess_peer import Entrance, main
from benchmarks.peers.inprocess_workloads import Workload


async def dynamically(workload: Workload, batch_size: int) -> Entrance:
    """Batches on a thread, which coroutines reach by `acall`."""
    call: Any = batched.dynamically(workload.function, batch_size=batch_size)
    return Entrance(call, call.acall)


async def aio(workload: Workload, batch_size: int) -> Entrance:
    """Batches of coroutines alone."""
    return Entrance(acall=batched.aio.dynamically(workload.function, batch_size=batch_size))


if __name__ == "__main__":
    main({"dynamically": dynamically, "aio": aio})
