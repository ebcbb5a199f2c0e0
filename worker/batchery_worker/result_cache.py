"""Equal items are computed once: within a batch and the one before, and by results kept in Redis.

Cache keys are digests of inputs. Equal inputs have the same digest, on every machine. An input is
everything that a result depends on: the item, the keywords, and the *version*, which stands for
code and model. Inputs are equal if they are equal as JSON, whatever the order of keys.

Only values are shared. If the outcome of an item is anything else, a failure or a retry, each of
its duplicates is computed separately: it may succeed, and each job counts its own retries.

A failing cache must not fail anything else. A result that cannot be read counts as missing, and one
that cannot be written is computed again. Errors are counted; while Redis is away the cache pauses.
"""

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from redis import ResponseError

from batchery.cluster_client import send_all
from batchery.execution.bisect_failures import NON_VALUES
from batchery.protocol.headers import backend_prefix
from batchery_worker.plain_values import Encoded, encoded, is_plain
from batchery_worker.work import CachePolicy, Work

logger = logging.getLogger("batchery.device")

#: Computes items; returns one outcome per item, in order.
Run = Callable[[list[Any]], Sequence[Any]]

#: Length of a digest, in bytes: no two of 2^64 inputs have the same one.
DIGEST_BYTES = 20

#: Version of keys and stored results; it changes whenever their form does.
KEY_FORMAT = 2

#: Length of the checksum before each result, in bytes; it detects what is foreign or broken.
CHECKSUM_BYTES = 4

#: How long an answer may take, in seconds, while a batch waits for it.
ANSWER_TIMEOUT_S = 5.0

#: How long nothing is read or written after Redis did not answer, in seconds.
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
    return [
        None if item is None else hashlib.blake2b(head + item, digest_size=DIGEST_BYTES).digest()
        for item in map(canonical, items)
    ]


class DedupedBatch:
    """The items of a batch, by their cache keys."""

    def __init__(self, keys: Sequence[bytes | None], found: Mapping[bytes, bytes]) -> None:
        """Chooses the items that must be computed.

        Args:
            keys: The cache key of each item; None for an item that is equal to no other.
            found: Encoded results that the cache has, by key.
        """
        self._keys = [object() if key is None else key for key in keys]
        #: Values from elsewhere, by key.
        self._known: dict[Any, Any] = {key: Encoded.load(text) for key, text in found.items()}
        #: Values that were computed here, by key: for the cache, and for the next batch.
        self.computed_values: dict[Any, Any] = {}
        #: Outcomes that are not shared, by position of the item.
        self._unshared: dict[int, Any] = {}
        self._hits = sum(key in self._known for key in self._keys)
        self._computed = 0
        first: dict[Any, int] = {}
        for at, key in enumerate(self._keys):
            first.setdefault(key, at)
        #: Positions of the items that must be computed, in order.
        self.positions = [at for key, at in first.items() if key not in self._known]

    def run(self, chosen: Sequence[Any], before: Mapping[Any, Any], run: Run) -> list[Any]:
        """Computes the items that must be computed.

        Args:
            chosen: The items at `positions`, prepared.
            before: Values of the previous batch, which ran while this one was prepared.
            run: Called at most twice: for different items, then for duplicates that need it.

        Returns:
            One outcome per item of the batch, in order.
        """
        items = dict(zip(self.positions, chosen, strict=True))
        self._known |= {key: before[key] for key in self._keys if key in before}
        self._compute({at: item for at, item in items.items() if self._keys[at] not in before}, run)
        failed = {self._keys[at]: items[at] for at in self._unshared}
        duplicates = [at for at, key in enumerate(self._keys) if key in failed and at not in items]
        self._compute({at: failed[self._keys[at]] for at in duplicates}, run)
        return self._outcomes()

    def encode(self) -> list[Any]:
        """Encodes each value once; returns the outcomes anew, in order."""
        for values in (self.computed_values, self._known):
            for key, value in values.items():
                if not isinstance(value, Encoded):
                    values[key] = encoded(value) or value
        return self._outcomes()

    def fresh(self) -> dict[bytes, bytes]:
        """The encoded results that the cache does not have; call `encode` first."""
        return {
            key: value.dump()
            for key, value in self.computed_values.items()
            if isinstance(key, bytes) and isinstance(value, Encoded)
        }

    def counts(self) -> dict[str, int]:
        """The number of items, and how many of them got their outcomes in which way."""
        items, known = len(self._keys), self._hits + self._computed
        return {
            "items": items,
            "hits": self._hits,
            "deduplicated": items - known,
            "computed": self._computed,
        }

    def _compute(self, items: Mapping[int, Any], run: Run) -> None:
        """Computes items, by position."""
        if not items:
            return
        self._computed += len(items)
        for at, outcome in zip(items, run(list(items.values())), strict=True):
            if isinstance(outcome, NON_VALUES):
                self._unshared[at] = outcome
            else:
                self.computed_values[self._keys[at]] = outcome

    def _outcomes(self) -> list[Any]:
        # Duplicates that were computed one by one may differ; any of their values will do.
        values = {**self._known, **self.computed_values}
        return [self._unshared.get(at, values.get(key)) for at, key in enumerate(self._keys)]


class ResultCache:
    """The caches of all tasks, in the result backend's Redis; for several threads."""

    def __init__(self, backend: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Does not connect yet; the backend is Celery's for Redis."""
        self._backend = backend
        self._clock = clock
        self._paused_until_s = float("-inf")
        self._errors = 0
        self._error = ""

    def get(self, task: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """The results that are there, by digest, as `Encoded.dump` writes them."""
        if not digests:
            return {}
        values = self._attempt(self._client.mget, [self._key(task, each) for each in digests])
        return {
            digest: value[CHECKSUM_BYTES:]
            for digest, value in zip(digests, values or (), strict=False)
            if value is not None and value[:CHECKSUM_BYTES] == _sum(value[CHECKSUM_BYTES:])
        }

    def put(self, task: str, results: Mapping[bytes, bytes], ttl_s: float) -> None:
        """Stores results for a time.

        Args:
            task: Name of the task.
            results: As `Encoded.dump` writes them, by digest.
            ttl_s: How long they are kept, in seconds.
        """
        values = {self._key(task, each): _sum(text) + text for each, text in results.items()}
        self._attempt(self._write, values, int(ttl_s * 1000))

    def take_errors(self) -> dict[str, Any]:
        """The number of `errors` since the last call, and the last `error`; usually empty."""
        errors, self._errors = self._errors, 0
        return {"errors": errors, "error": self._error} if errors else {}

    def _key(self, task: str, digest: bytes) -> bytes:
        """Key of a STRING: CRC-32 of what `Encoded.dump` writes, 4 bytes, then that."""
        return backend_prefix(self._backend, digest) + f"batchery:cache:{task}:".encode() + digest

    def _write(self, values: Mapping[bytes, bytes], ttl_ms: int) -> None:
        if values:
            send_all(self._client, [("SET", *each, "PX", ttl_ms) for each in values.items()])

    def _attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer of a call; None if it fails, or Redis did not answer a moment ago."""
        if self._clock() < self._paused_until_s:
            return None
        try:
            return call(*args)
        except Exception as error:  # noqa: BLE001 - no error of the cache may end the device
            if str(error) != self._error:
                logger.warning("the result cache cannot be used: %s", error)
            self._error = str(error)
            self._errors += 1
            # A full Redis refuses writes at once, and can still be read.
            if not isinstance(error, ResponseError):
                self._paused_until_s = self._clock() + FAILURE_PAUSE_S
            return None

    @cached_property
    def _client(self) -> Any:
        # Not the backend's client, which may wait for minutes, and may decode bytes into text.
        options = {**self._backend.connparams, "decode_responses": False}
        # A Unix socket has but one of them.
        timeouts = {"socket_timeout", "socket_connect_timeout"} & options.keys()
        return self._backend._create_client(**options | dict.fromkeys(timeouts, ANSWER_TIMEOUT_S))


def _sum(text: bytes) -> bytes:
    return zlib.crc32(text).to_bytes(CHECKSUM_BYTES, "big")


class SingleFlight:
    """The cache as one device uses it; each method is called by one thread at a time."""

    def __init__(self, cache: ResultCache) -> None:
        self._cache = cache
        #: Values of the previous batch. Older ones are in Redis, because a device holds at most two
        #: batches, and stores their results before it answers.
        self._before: Mapping[Any, Any] = {}

    def begin(
        self, work: Work, policy: CachePolicy, items: Sequence[Any], identity: str
    ) -> DedupedBatch:
        """Finds the items of a batch that must be computed; the previous batch may still run.

        Args:
            work: The batch.
            policy: That of its task.
            items: The items of all its jobs, in order.
            identity: That of the model; empty for a function.
        """
        version = (work.task, policy.version, identity)
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
        self._cache.put(work.task, deduped.fresh(), work.cache.ttl_s)
        return {**deduped.counts(), **self._cache.take_errors()}
