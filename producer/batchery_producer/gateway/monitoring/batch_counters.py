"""Counts what `/process-batch` did, in all processes of all gateways together."""

from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

from batchery_producer.answers import BatchSummary
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import Store


class BatchTotals(NamedTuple):
    """What was counted.

    Attributes:
        requests: Requests that were answered.
        texts: Their texts.
        batches: Batches in which their texts were computed.
        forward_s: Time of these batches' computation.
        peak_batch_size: Items of the largest.
    """

    requests: int = 0
    texts: int = 0
    batches: int = 0
    forward_s: float = 0.0
    peak_batch_size: int = 0


class BatchCounters:
    """Keeps the counters as a sorted set in Redis, which can add and can keep a maximum."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key = store.key("batch-stats")

    async def count(self, texts: int, batches: Collection[BatchSummary]) -> None:
        """Counts a request, in one round trip.

        If Redis has gone, it is not counted: its labels matter more.
        """
        sums = {
            "requests": 1,
            "texts": texts,
            "batches": len(batches),
            "forward_s": sum(batch.forward_ms for batch in batches) / 1000,
        }
        peak = max((batch.size for batch in batches), default=0)

        def add(client: Any) -> None:
            with client.pipeline(transaction=False) as pipe:
                for name, amount in sums.items():
                    pipe.zincrby(self._key, amount, name)
                pipe.zadd(self._key, {"peak_batch_size": peak}, gt=True)
                pipe.execute()

        with suppress(Problem):
            await self._store.run(add)

    async def totals(self) -> BatchTotals:
        """What was counted so far.

        Raises:
            Problem: Redis is away.
        """
        found = await self._store.run(
            lambda client: client.zrange(self._key, 0, -1, withscores=True)
        )
        known = {name.decode(): score for name, score in found}
        kinds = BatchTotals.__annotations__
        return BatchTotals(**{name: kinds[name](known[name]) for name in kinds if name in known})
