"""A pipeline: a producer sends items as they come, and batches of four leave after 0.2 s at most.

If results are read more slowly than items come, the producer waits.

`python pipeline.py` runs it.
"""

import asyncio

from batchery import batched

#: Maximum number of results that wait for the consumer: without a bound, a slow one would have them
#: fill the memory.
MAX_AHEAD = 8

Tasks = asyncio.Queue[asyncio.Task[int] | None]


@batched(max_batch_size=4, max_wait_ms=200)
async def process(numbers: list[int]) -> list[int]:
    """Squares numbers, as a model would: a whole batch at once."""
    print("batch", numbers)
    await asyncio.sleep(0.05)
    return [number * number for number in numbers]


async def produce(tasks: Tasks) -> None:
    """Sends twenty items; while there is no space for another one, it waits."""
    for number in range(20):
        await tasks.put(asyncio.create_task(process.acall(number)))
        await asyncio.sleep(0.01)
    await tasks.put(None)


async def consume(tasks: Tasks) -> list[int]:
    """Takes the results in the order of the items."""
    results = []
    while (task := await tasks.get()) is not None:
        results.append(await task)
    return results


async def main() -> None:
    """Runs both; what was sent is answered before the end. If one of them fails, both end."""
    tasks: Tasks = asyncio.Queue(MAX_AHEAD)
    async with process, asyncio.TaskGroup() as group:
        group.create_task(produce(tasks))
        results = group.create_task(consume(tasks))
    print("results", results.result())


if __name__ == "__main__":
    asyncio.run(main())
