"""A pipeline: a producer sends items as they come, and batches of four leave after 0.2 s at most.

`python pipeline.py` runs it.
"""

import asyncio

from batchery import batched


@batched(max_batch_size=4, max_wait_ms=200, max_waiting=8)
async def process(numbers: list[int]) -> list[int]:
    """Squares numbers, as a model would: a whole batch at once."""
    print("batch", numbers)
    await asyncio.sleep(0.05)
    return [number * number for number in numbers]


async def produce(tasks: "asyncio.Queue[asyncio.Task[int] | None]") -> None:
    """Sends ten items. With eight of them waiting, it waits for space."""
    for number in range(10):
        tasks.put_nowait(asyncio.create_task(process.acall(number)))
        await asyncio.sleep(0.01)
    tasks.put_nowait(None)


async def consume(tasks: "asyncio.Queue[asyncio.Task[int] | None]") -> list[int]:
    """Takes the results in the order of the items."""
    results = []
    while (task := await tasks.get()) is not None:
        results.append(await task)
    return results


async def main() -> None:
    """Runs both; what was sent is answered before the end."""
    tasks: asyncio.Queue[asyncio.Task[int] | None] = asyncio.Queue()
    async with process:
        _, results = await asyncio.gather(produce(tasks), consume(tasks))
    print("results", results)


if __name__ == "__main__":
    asyncio.run(main())
