"""Results that need not be computed: of an equal item of the batch, the batch before, the cache.

Each job keeps its own lease, result and acknowledgement; what is saved is the computation. Another
device of the worker gets no item that is computed here just now: the scheduler sees to that.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from batchery_worker.digests import digests
from batchery_worker.folding import Folding, Run
from batchery_worker.result_cache import ResultCache
from batchery_worker.wire import Work


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
        return {**folding.counts(), **told, **self._cache.trouble()}
