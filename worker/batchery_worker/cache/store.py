"""The cached results in Redis, read and written for a whole batch at once.

A failing cache must not fail anything else. A result that cannot be read counts as missing, and one
that cannot be written is computed again. Such errors are counted, and the cache pauses for a while.
"""

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from batchery.protocol.completion_stream import backend_prefix
from batchery_worker.ipc.commit_context import CachePolicy

T = TypeVar("T")

logger = logging.getLogger("batchery.device")

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


class ResultCache:
    """The caches of all tasks, in the result backend's Redis; for several threads."""

    def __init__(self, backend: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Does not connect yet; the backend is Celery's for Redis."""
        self._backend = backend
        self._reads = _Direction("read", clock)
        self._writes = _Direction("written", clock)

    def get(self, task: str, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """The JSON of the results that are there, by digest, see `cache/keys.py`."""
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
        small = {
            digest: _sum(json) + json
            for digest, json in results.items()
            if CHECKSUM_BYTES + len(json) + OVERHEAD_BYTES <= policy.max_bytes
        }
        for part in _parts(small):
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
        self, task: str, part: Mapping[bytes, bytes], policy: CachePolicy
    ) -> tuple[int, int, int]:
        prefix = self._key("cache", task) + b":"
        keys = [self._key("cache-ages", task), self._key("cache-sizes", task)]
        keys += [prefix + digest for digest in part]
        args: list[Any] = [int(policy.ttl_s * 1000), policy.max_bytes, prefix, OVERHEAD_BYTES]
        for digest, json in part.items():
            args += (digest, json)
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


def _parts(results: Mapping[bytes, bytes]) -> Iterator[Mapping[bytes, bytes]]:
    """Cuts results into parts, one for each call of the script."""
    part: dict[bytes, bytes] = {}
    size_bytes = 0
    for digest, json in results.items():
        part[digest] = json
        size_bytes += len(json)
        if len(part) == MAX_RESULTS_PER_COMMAND or size_bytes >= MAX_BYTES_PER_COMMAND:
            yield part
            part, size_bytes = {}, 0
    if part:
        yield part
