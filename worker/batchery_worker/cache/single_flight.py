"""Single flight: equal items of a batch are computed once. Pure, except for the cache.

Only values are shared. If the outcome of an item is anything else, a failure or a retry, each of
its duplicates is computed separately: it may succeed, and each job counts its own retries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchery.execution.bisect_failures import NON_VALUES
from batchery_worker.cache.keys import digests
from batchery_worker.cache.store import ResultCache
from batchery_worker.ipc.messages import Work
from batchery_worker.ipc.values import Encoded, encoded

#: Computes items; returns one outcome per item, in order.
Run = Callable[[list[Any]], Sequence[Any]]


class DedupedBatch:
    """The items of a batch, by their cache keys."""

    def __init__(self, keys: Sequence[bytes | None], found: Mapping[bytes, bytes]) -> None:
        """Chooses the items that must be computed.

        Args:
            keys: The cache key of each item; None for an item that is equal to no other.
            found: Encoded results that the cache has, by key.
        """
        self._keys = keys
        self._known: dict[bytes, Any] = {key: Encoded(json) for key, json in found.items()}
        #: Values that were computed here, by key: for the cache, and for the next batch.
        self.computed_values: dict[bytes, Any] = {}
        #: Outcomes that are not shared, by position of the item.
        self._unshared: dict[int, Any] = {}
        #: Position of an item that is computed -> positions of its duplicates.
        self._duplicates: dict[int, list[int]] = {}
        #: Positions of the items that must be computed, in order.
        self.positions: list[int] = []
        self.hits = self.computed = 0
        first: dict[bytes, int] = {}
        for position, key in enumerate(keys):
            if key in self._known:
                self.hits += 1
            elif key is not None and key in first:
                self._duplicates[first[key]].append(position)
            else:
                self.positions.append(position)
                if key is not None:
                    first[key] = position
                    self._duplicates[position] = []

    def run(self, chosen: Sequence[Any], before: Mapping[bytes, Any], run: Run) -> list[Any]:
        """Computes the items that must be computed.

        Args:
            chosen: The items at `positions`, prepared.
            before: Values of the previous batch, which ran while this one was prepared.
            run: Called at most twice: for different items, then for duplicates that need it.

        Returns:
            One outcome per item of the batch, in order.
        """
        left = [
            (position, item)
            for position, item in zip(self.positions, chosen, strict=True)
            if not self._recall(position, before)
        ]
        without = self._compute(left, run)
        again = [
            (each, item)
            for position, item in without
            for each in self._duplicates.get(position, ())
        ]
        self._compute(again, run)
        return self._outcomes()

    def encode(self) -> list[Any]:
        """Encodes each value once; returns the outcomes anew, in order."""
        for known in (self.computed_values, self._known):
            for key, outcome in known.items():
                if not isinstance(outcome, Encoded):
                    known[key] = encoded(outcome) or outcome
        # Duplicates that were computed one by one may differ; any of their values will do.
        self._known.update(self.computed_values)
        return self._outcomes()

    def fresh(self) -> dict[bytes, bytes]:
        """The encoded results that the cache does not have; call `encode` first."""
        return {
            key: outcome.json
            for key, outcome in self.computed_values.items()
            if isinstance(outcome, Encoded)
        }

    def counts(self) -> dict[str, int]:
        """The number of items, and how many of them got their outcomes in which way."""
        items = len(self._keys)
        return {
            "items": items,
            "hits": self.hits,
            "deduplicated": items - self.hits - self.computed,
            "computed": self.computed,
        }

    def _recall(self, position: int, before: Mapping[bytes, Any]) -> bool:
        key = self._keys[position]
        if key is None or key not in before:
            return False
        self._known[key] = before[key]
        return True

    def _compute(self, part: Sequence[tuple[int, Any]], run: Run) -> list[tuple[int, Any]]:
        """Computes some items; returns those whose outcome is not a value to share."""
        if not part:
            return []
        self.computed += len(part)
        without = []
        outcomes = run([item for _, item in part])
        for (position, item), outcome in zip(part, outcomes, strict=True):
            key = self._keys[position]
            if key is None or isinstance(outcome, NON_VALUES):
                self._unshared[position] = outcome
                without.append((position, item))
            else:
                self.computed_values[key] = self._known[key] = outcome
        return without

    def _outcomes(self) -> list[Any]:
        return [
            self._unshared[position] if position in self._unshared else self._known[key]  # type: ignore[index]
            for position, key in enumerate(self._keys)
        ]


class SingleFlight:
    """The cache as one device uses it; each method is called by one thread at a time."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        #: Values of the previous batch. Older ones are in Redis, because a device holds at most two
        #: batches, and stores their results before it answers.
        self._before: Mapping[bytes, Any] = {}

    def begin(self, work: Work, items: Sequence[Any], identity: str) -> DedupedBatch | None:
        """Finds the items of a batch that must be computed; the previous batch may still run.

        Args:
            work: The batch.
            items: The items of all its jobs, in order.
            identity: That of the model; empty for a function.

        Returns:
            None for a task without a cache.
        """
        if work.cache is None:
            return None
        version = (work.task, work.cache.version, identity)
        keys = digests(version, work.keywords, items)
        missing = list(dict.fromkeys(key for key in keys if key is not None))
        return DedupedBatch(keys, self._cache.get(work.task, missing))

    def run(self, deduped: DedupedBatch | None, items: Sequence[Any], run: Run) -> list[Any]:
        """Computes the prepared items that must be computed; on the main thread."""
        before, self._before = self._before, {} if deduped is None else deduped.computed_values
        if deduped is None:
            return list(run(list(items)))
        return deduped.run(items, before, run)

    def keep(self, deduped: DedupedBatch, work: Work) -> dict[str, Any]:
        """Stores the encoded results, before the batch is answered; returns figures of it."""
        assert work.cache is not None
        counts = self._cache.put(work.task, deduped.fresh(), work.cache)
        return {**deduped.counts(), **counts, **self._cache.take_errors()}
