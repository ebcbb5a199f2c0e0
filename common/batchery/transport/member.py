"""A worker among the living: what Redis, and through it the other workers, know of it."""

import json
import os
import platform
import uuid
from typing import Any

from batchery.transport.keys import Keys
from batchery.transport.scripts import Scripts
from batchery.transport.server import facts_of, refuse_unfit, warn_of_eviction


class Member:
    """Enters and leaves; a new worker id each time."""

    def __init__(self, client: Any, keys: Keys, scripts: Scripts, expiry_s: float) -> None:
        """Asks nothing of Redis yet; `expiry_s` is how long it may be silent."""
        self._client = client
        self._keys = keys
        self._scripts = scripts
        self._expiry_s = expiry_s
        self._pid = os.getpid()
        self.worker = ""

    @property
    def is_mine(self) -> bool:
        """False in a forked child, whose parent goes on holding the leases."""
        return self._pid == os.getpid()

    def check(self) -> None:
        """Looks at the server.

        Raises:
            RedisUnavailable: It cannot do what leases need; says what.
            redis.RedisError: It does not answer.
        """
        refuse_unfit(facts_of(self._client, "server"))
        warn_of_eviction(facts_of(self._client, "memory"))

    def enter(self, last_token: int) -> None:
        """Begins to live.

        Args:
            last_token: No lower one must be given out again.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        self.worker = uuid.uuid4().hex
        about = {"host": platform.node(), "pid": os.getpid(), "expiry_s": self._expiry_s}
        self._scripts.run(
            "register",
            [self._keys.workers, self._keys.worker_info, self._keys.token],
            *[self.worker, json.dumps(about), last_token],
        )

    def leave(self) -> None:
        """Ends; what it still holds goes back to the queues, in the original order.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        keys = self._keys.of_recovery(self.worker)
        self._scripts.run("recover", keys, self.worker, "", 0)


def expiry_in(about: bytes | None) -> float | None:
    """How long a worker may be silent, in seconds, by what it said of itself; None if it did not.

    Args:
        about: Its entry in worker-info.
    """
    try:
        said = json.loads(about or b"{}")["expiry_s"]
        return float(said) if said > 0 else None
    except (ValueError, TypeError, KeyError):
        return None
