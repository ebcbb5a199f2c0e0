"""A dynamic batcher in front of a slow service: size and time, a latency target, priorities.

`python dynamic_batcher.py` runs it.
"""

import asyncio
import time

from batchery import QueueFull, batched


class Service:
    """Answers requests; a batch costs 20 ms, and 1 ms per request."""

    @batched(
        max_batch_size=32,
        max_wait_ms=50,
        target_latency_ms=200,
        classes={"live": 80, "bulk": 20},
        max_waiting=500,
    )
    def process(self, requests: list[str]) -> list[str]:
        """Computes a batch."""
        time.sleep(0.02 + 0.001 * len(requests))
        return [request.title() for request in requests]


async def main() -> None:
    """Floods the service, and asks it something urgent."""
    service = Service()
    bulk = service.process.options(priority_class="bulk")
    live = service.process.options(priority_class="live", timeout_s=5)
    flood = [asyncio.create_task(bulk.acall(f"request {number}")) for number in range(480)]
    await asyncio.sleep(0.05)
    began_s = time.perf_counter()
    print(await live.acall("urgent request"))
    urgent_s = time.perf_counter() - began_s
    print(sum(task.done() for task in flood) < 480, "before the flood is over")
    try:
        await bulk.acall([f"more {number}" for number in range(501)])
    except QueueFull as error:
        print(f"full, try again in {error.retry_after_s:.1f} s")
    answers = await asyncio.gather(*flood)
    print(len(answers), "answers;", "urgent" if urgent_s < 0.5 else "late")
    print(service.process.stats)


if __name__ == "__main__":
    asyncio.run(main())
