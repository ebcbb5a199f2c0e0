"""How many requests and tokens a server gets per minute, from all workers together."""

import asyncio
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from celery.app import app_or_default
from redis import RedisError

from batchery.redis_scripts import RedisScripts
from batchery.retry import is_away
from batchery_worker.commit.committer import broker_client

LUA = Path(__file__).parent / "lua"

#: Part of a minute's requests or tokens that may leave at once, after a pause.
BURST = 0.1

#: Longest sleep before Redis is asked again, in seconds: others give back what they did not need.
MAX_SLEEP_S = 5.0

#: How often Redis is asked that is away, in milliseconds. Jobs wait for it, as for their turn.
AWAY_MS = 1000


def bucket(per_minute: int | None) -> tuple[float, float]:
    """Capacity of a bucket, and how much it gains per millisecond; zeros for no limit.

    What is there at once and what comes within a minute are together no more than the limit.
    """
    if per_minute is None:
        return 0, 0
    capacity = max(1.0, per_minute * BURST)
    return capacity, max(per_minute - capacity, per_minute / 2) / 60_000


class RateLimit:
    """Two buckets in Redis, shared by all workers with the same key; for one event loop."""

    def __init__(self, connect: Callable[[], Any], key: str, *per_minute: int | None) -> None:
        """Does not connect yet.

        Args:
            connect: Makes a client of Redis.
            key: Name of the buckets in Redis.
            per_minute: Maximum requests, and maximum tokens; None for no limit.
        """
        self._connect = connect
        self._key = key
        self._requests, self._tokens = map(bucket, per_minute)
        #: A request takes no more, whatever it asks for, as all others would wait for it.
        self._max_tokens = per_minute[1] or 0
        # Only the first one in the row asks Redis, so a thousand waiting requests cost no more.
        self._turn = asyncio.Lock()

    async def take(self, tokens: int) -> None:
        """Waits until a request with so many tokens may leave; it takes a minute's worth at most.

        Raises:
            ConnectionError: Redis refuses, and is not away.
        """
        taken = min(tokens, self._max_tokens)
        if self._requests[0] or self._tokens[0]:
            async with self._turn:
                while wait_ms := await asyncio.to_thread(self._run, 0, 1, taken):
                    await asyncio.sleep(min(wait_ms / 1e3, MAX_SLEEP_S))

    async def correct(self, tokens: int, used: int) -> None:
        """Takes what a request used in place of the tokens for which it came.

        Raises:
            ConnectionError: Redis does not answer.
        """
        if self._tokens[0]:
            # A server's count is not believed where it is more than could be.
            used = min(used, max(tokens, self._max_tokens))
            await asyncio.to_thread(self._run, 1, 0, used - min(tokens, self._max_tokens))

    @cached_property
    def _scripts(self) -> RedisScripts:
        return RedisScripts(self._connect(), LUA)

    def _run(self, at_once: int, requests: int, tokens: int) -> int:
        taken = (*self._requests, requests, *self._tokens, tokens)
        try:
            return int(self._scripts.run("take", [self._key], at_once, *taken))
        except (RedisError, OSError) as error:
            # Another server may be at its address by then.
            vars(self).pop("_scripts", None)
            if is_away(error) and not at_once:
                return AWAY_MS
            raise ConnectionError(f"Redis, which has its rate limit: {error}") from None


def make_rate_limit(name: str, *per_minute: int | None) -> RateLimit:
    """Limits in the broker of the app that runs, for all of its workers."""
    app = app_or_default()
    prefix = app.conf.broker_transport_options.get("global_keyprefix", "")
    return RateLimit(lambda: broker_client(app), f"{prefix}batchery:rate:{name}", *per_minute)
