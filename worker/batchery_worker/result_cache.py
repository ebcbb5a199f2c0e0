"""Equal items are computed once: within a batch and the one before, and by results kept in Redis.

Cache keys are digests of inputs. Equal inputs have the same digest, on every machine. An input is
everything that a result depends on: the item, the keywords, and the *version*, which stands for
code and model. Inputs are equal if they are equal as JSON, whatever the order of keys.

Only values are shared. If the outcome of an item is anything else, a failure or a retry, each of
its duplicates is computed separately: it may succeed, and each job counts its own retries.

A failing cache must not fail anything else. A result that cannot be read counts as missing, and one
that cannot be written is computed again. Such errors are counted, and the cache pauses for a while.
"""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from batchery.execution.bisect_failures import NON_VALUES
from batchery.protocol.headers import backend_prefix
from batchery.redis_scripts import cut_into_parts
from batchery_worker.ipc.messages import CachePolicy, Work
from batchery_worker.ipc.values import Encoded, encoded, is_plain

T = TypeVar("T")

logger = logging.getLogger("batchery.device")

#: Computes items; returns one outcome per item, in order.
Run = Callable[[list[Any]], Sequence[Any]]

#: Length of a digest, in bytes: no two of 2^64 inputs have the same one.
DIGEST_BYTES = 20

#: Version of keys and stored results; it changes whenever their form does.
KEY_FORMAT = 1

REMEMBER_LUA = Path(__file__).parent / "lua" / "remember.lua"

#: Maximum number of results in one command, and number of bytes after which no further result is
#: added to it: Redis serves nobody else meanwhile.
MAX_RESULTS_PER_COMMAND = 512
MAX_BYTES_PER_COMMAND = 4 << 20

#: Memory that Redis needs for a result in addition to its JSON, in bytes: its key, and two entries
#: with its age and size. Redis 6.2 takes 350 to 410.
OVERHEAD_BYTES = 400

#: Length of the checksum before each JSON, in bytes. It detects values that are foreign or broken.
CHECKSUM_BYTES = 4

#: How long an answer may take, in seconds, while a batch waits for it.
ANSWER_TIMEOUT_S = 5.0

#: How long nothing is read after a failed read, or written after a failed write, in seconds.
FAILURE_PAUSE_S = 5.0


def canonical(value: Any) -> bytes | None:
    """The same bytes for all equal values; None for a value that JSON cannot write."""
    if type(value) is str:
        # A text is the common item, and may be long, so it is not encoded as JSON.
        return b"s" + value.encode("utf-8", "surrogatepass")
    try:
        if not is_plain(value):
            return None
        return b"j" + json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (RecursionError, ValueError):
        return None


def digests(
    version: Sequence[str], keywords: Mapping[str, Any], items: Sequence[Any]
) -> list[bytes | None]:
    """The digests of a batch's inputs, one per item, in order.

    Args:
        version: Version of the results: the task's name, and what stands for its code and model.
        keywords: The keywords of the batch.
        items: The items as they were submitted.

    Returns:
        None for an item without a digest: it counts as equal to no other.
    """
    shared = canonical({**keywords})
    if shared is None:
        return [None] * len(items)
    # The length separates the parts: the end of one cannot look like the start of the next.
    head = json.dumps([KEY_FORMAT, *version, len(shared)]).encode() + shared
    start = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
    return [_digest(start, canonical(item)) for item in items]


def _digest(start: Any, item: bytes | None) -> bytes | None:
    if item is None:
        return None
    own = start.copy()
    own.update(item)
    digest: bytes = own.digest()
    return digest


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


class ResultCache:
    """The caches of all tasks, in the result backend's Redis; for several threads."""

    def __init__(self, backend: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Does not connect yet; the backend is Celery's for Redis."""
        self._backend = backend
        self._reads = _Direction("read", clock)
        self._writes = _Direction("written", clock)

    def get(self, task: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """The JSON of the results that are there, by digest."""
        found: dict[bytes, bytes] = {}
        prefix = self._key("cache", task) + b":"
        for start in range(0, len(digests), MAX_RESULTS_PER_COMMAND):
            part = digests[start : start + MAX_RESULTS_PER_COMMAND]
            keys = [prefix + digest for digest in part]
            values: list[bytes | None] | None = self._reads.attempt(
                partial(self._client.mget, keys)
            )
            if values is None:
                break
            found.update(
                (digest, value[CHECKSUM_BYTES:])
                for digest, value in zip(part, values, strict=True)
                if value is not None and value[:CHECKSUM_BYTES] == _sum(value[CHECKSUM_BYTES:])
            )
        return found

    def put(self, task: str, results: Mapping[bytes, bytes], policy: CachePolicy) -> dict[str, int]:
        """Stores results; the oldest ones are evicted if the cache is full.

        Args:
            task: Name of the task.
            results: Their JSON, by digest.
            policy: How long results are kept, and how many bytes of them.

        Returns:
            The number of `results` and `bytes` in the cache now, and how many results were
            `evicted`; empty if nothing was stored.
        """
        counts: dict[str, int] = {}
        small = [
            (digest, _sum(json) + json)
            for digest, json in results.items()
            if CHECKSUM_BYTES + len(json) + OVERHEAD_BYTES <= policy.max_bytes
        ]
        for part in cut_into_parts(
            small, lambda each: len(each[1]), MAX_BYTES_PER_COMMAND, MAX_RESULTS_PER_COMMAND
        ):
            answer = self._writes.attempt(partial(self._remember, task, part, policy))
            if answer is None:
                break
            size, count, evicted = answer
            counts = {
                "bytes": size,
                "results": count,
                "evicted": counts.get("evicted", 0) + evicted,
            }
        return counts

    def take_errors(self) -> dict[str, Any]:
        """The number of `errors` since the last call, and the last `error`; usually empty."""
        failed = [each for each in (self._reads, self._writes) if each.errors]
        if not failed:
            return {}
        counts = {"errors": sum(each.errors for each in failed), "error": failed[-1].error}
        for each in failed:
            each.errors = 0
        return counts

    def _key(self, what: str, task: str) -> bytes:
        return backend_prefix(self._backend) + f"batchery:{what}:{task}".encode()

    def _remember(
        self, task: str, part: Sequence[tuple[bytes, bytes]], policy: CachePolicy
    ) -> tuple[int, int, int]:
        prefix = self._key("cache", task) + b":"
        keys = [self._key("cache-ages", task), self._key("cache-sizes", task)]
        keys += [prefix + digest for digest, _ in part]
        args: list[Any] = [int(policy.ttl_s * 1000), policy.max_bytes, prefix, OVERHEAD_BYTES]
        for pair in part:
            args += pair
        size, count, evicted = self._script(keys=keys, args=args)
        return int(size), int(count), int(evicted)

    @cached_property
    def _client(self) -> Any:
        # Not the backend's client, which may wait for minutes, and may decode bytes into text.
        own: dict[str, Any] = {"socket_timeout": ANSWER_TIMEOUT_S, "decode_responses": False}
        if "socket_connect_timeout" in self._backend.connparams:
            own["socket_connect_timeout"] = ANSWER_TIMEOUT_S
        return self._backend._create_client(**{**self._backend.connparams, **own})

    @cached_property
    def _script(self) -> Any:
        return self._client.register_script(REMEMBER_LUA.read_text())


class _Direction:
    """Reads or writes; pauses after a failure."""

    def __init__(self, verb: str, clock: Callable[[], float]) -> None:
        self._verb = verb
        self._clock = clock
        self._paused_until_s = float("-inf")
        self.errors = 0
        self.error = ""

    def attempt(self, call: Callable[[], T]) -> T | None:
        """The answer of a call; None if it fails, or the last one failed a moment ago."""
        if self._clock() < self._paused_until_s:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - no error of the cache may end the device
            text = f"cannot be {self._verb}: {error}"
            if text != self.error:
                logger.warning("the result cache %s", text)
            self.error = text
            self.errors += 1
            self._paused_until_s = self._clock() + FAILURE_PAUSE_S
            return None


def _sum(json: bytes) -> bytes:
    return zlib.crc32(json).to_bytes(CHECKSUM_BYTES, "big")


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
