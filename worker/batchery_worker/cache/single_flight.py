"""One batch whose equal items are computed once: pure.

Only values are shared. Where the computation of an item ends in anything else, a failure or a wish
to be tried again, each of its twins is computed for itself: it may fare better, and its job decides
about its own retries.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from batchery.execution.bisect_failures import SETTLED
from batchery_worker.cache.keys import digests
from batchery_worker.cache.store import ResultCache
from batchery_worker.ipc.messages import Work
from batchery_worker.ipc.values import Encoded, encoded

#: Computes items; returns one outcome per item, in order.
Run = Callable[[list[Any]], Sequence[Any]]


class Folding:
    """The items of a batch, by the names of their inputs."""

    def __init__(self, keys: Sequence[bytes | None], found: Mapping[bytes, bytes]) -> None:
        """Chooses what has to be computed.

        Args:
            keys: Of each item, the name of its input; None for one that is equal to nothing.
            found: Results by key, encoded, that the cache has.
        """
        self._keys = keys
        self._known: dict[bytes, Any] = {key: Encoded(json) for key, json in found.items()}
        #: What was computed here, by key: for the cache, and for the batch that comes next.
        self.learnt: dict[bytes, Any] = {}
        self._alone: dict[int, Any] = {}
        #: Of each item that is computed for its twins as well: its place -> theirs.
        self._twins: dict[int, list[int]] = {}
        #: Where the items stand that have to be computed, in order.
        self.places: list[int] = []
        self.hits = self.computed = 0
        first: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            if key in self._known:
                self.hits += 1
            elif key is not None and key in first:
                self._twins[first[key]].append(place)
            else:
                self.places.append(place)
                if key is not None:
                    first[key] = place
                    self._twins[place] = []

    def run(self, chosen: Sequence[Any], before: Mapping[bytes, Any], run: Run) -> list[Any]:
        """Computes what is left to compute.

        Args:
            chosen: The items at `places`, prepared.
            before: What the batch before has learnt: it ran while this one was prepared.
            run: Called at most twice; first for different items, then for twins that need it.

        Returns:
            One outcome per item of the batch, in order.
        """
        left = [
            (place, item)
            for place, item in zip(self.places, chosen, strict=True)
            if not self._recall(place, before)
        ]
        without = self._learn(left, run)
        again = [(twin, item) for place, item in without for twin in self._twins.get(place, ())]
        self._learn(again, run)
        return self._outcomes()

    def encode(self) -> list[Any]:
        """Encodes each value once; returns the outcomes anew, in order."""
        for known in (self.learnt, self._known):
            for key, outcome in known.items():
                if not isinstance(outcome, Encoded):
                    known[key] = encoded(outcome) or outcome
        # Of twins that were computed one by one, too, one value is as good as the other.
        self._known.update(self.learnt)
        return self._outcomes()

    def fresh(self) -> dict[bytes, bytes]:
        """What the cache does not have; after `encode`."""
        return {
            key: outcome.json
            for key, outcome in self.learnt.items()
            if isinstance(outcome, Encoded)
        }

    def counts(self) -> dict[str, int]:
        """How many items there were, and how they got their outcomes."""
        items = len(self._keys)
        folded = items - self.hits - self.computed
        return {"items": items, "hits": self.hits, "folded": folded, "computed": self.computed}

    def _recall(self, place: int, before: Mapping[bytes, Any]) -> bool:
        key = self._keys[place]
        if key is None or key not in before:
            return False
        self._known[key] = before[key]
        return True

    def _learn(self, part: Sequence[tuple[int, Any]], run: Run) -> list[tuple[int, Any]]:
        """Computes a part; returns what of it has ended without a value to share."""
        if not part:
            return []
        self.computed += len(part)
        without = []
        outcomes = run([item for _, item in part])
        for (place, item), outcome in zip(part, outcomes, strict=True):
            key = self._keys[place]
            if key is None or isinstance(outcome, SETTLED):
                self._alone[place] = outcome
                without.append((place, item))
            else:
                self.learnt[key] = self._known[key] = outcome
        return without

    def _outcomes(self) -> list[Any]:
        return [
            self._alone[place] if place in self._alone else self._known[key]  # type: ignore[index]
            for place, key in enumerate(self._keys)
        ]


class Reuse:
    """Of one device; each method is called by one thread at a time."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        #: What the last batch has learnt. Anything older was stored before this one was sent here:
        #: a device holds two batches at most, and answers for one after its results are stored.
        self._before: Mapping[bytes, Any] = {}

    def begin(self, work: Work, items: Sequence[Any], identity: str) -> Folding | None:
        """Looks which items of a batch have to be computed, while the batch before may run.

        Args:
            work: The batch.
            items: Of all its jobs, in order.
            identity: Of the model; empty for a function.

        Returns:
            None for a task without a cache.
        """
        if work.cache is None:
            return None
        version = (work.task, work.cache.version, identity)
        keys = digests(version, work.keywords, items)
        wanted = list(dict.fromkeys(key for key in keys if key is not None))
        return Folding(keys, self._cache.get(work.task, wanted))

    def run(self, folding: Folding | None, items: Sequence[Any], run: Run) -> list[Any]:
        """Computes what is left to compute; on the main thread.

        Args:
            folding: Of the batch.
            items: Those that have to be computed, prepared; all of them, without a folding.
            run: Computes some of them.
        """
        before, self._before = self._before, {} if folding is None else folding.learnt
        if folding is None:
            return list(run(list(items)))
        return folding.run(items, before, run)

    def keep(self, folding: Folding, work: Work) -> dict[str, Any]:
        """Stores what was computed; before the batch is answered for.

        Args:
            folding: Of the batch; encoded.
            work: The batch.

        Returns:
            Figures for the statistics.
        """
        assert work.cache is not None
        told = self._cache.put(work.task, folding.fresh(), work.cache)
        return {**folding.counts(), **told, **self._cache.take_errors()}
