"""What Redis is told beside acknowledgements: which jobs are on a device, who is cleared."""

import json
import re
from collections import deque
from collections.abc import Mapping
from itertools import count
from typing import Any
from urllib.parse import quote

from batchery.transport.keys import Keys
from batchery.transport.scripts import Scripts

#: After which time, in seconds, a note about a running batch goes away by itself: a fenced worker
#: may write one for which nobody else looks. Longer than any batch runs.
RUNNING_TTL_S = 24 * 3600

#: Ids that are written as they are; that of almost every job is one.
PLAIN_ID = re.compile(r"[\w.-]+", re.ASCII)


class Notes:
    """Written down at once, sent with the next acknowledgements: a round trip costs 0.1 ms."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._numbers = count(1)
        self._waiting: deque[tuple[str, ...]] = deque()
        # Not worth a round trip: recovery looks only at jobs whose leases are still there.
        self._ended: deque[str] = deque()
        #: Token and dead letter of each message that goes there in place of its acknowledgement.
        self._burials: deque[tuple[str, Mapping[str, Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether something is there that must not wait for the next acknowledgement."""
        return bool(self._waiting or self._burials)

    def began(self, jobs: Mapping[str, str], *, alone: bool) -> int:
        """Notes a batch; see `Ledger.began`."""
        batch = next(self._numbers)
        words = ["alone" if alone else "shared"]
        for token, task_id in jobs.items():
            words += (token, spell_id(task_id))
        self._waiting.append(("began", str(batch), " ".join(words)))
        return batch

    def ended(self, batch: int) -> None:
        """The batch is on no device any more."""
        self._ended.append(str(batch))

    def cleared(self, suspect: str) -> None:
        """The job is settled: nobody needs to know any more who died with it."""
        self._waiting.append(("cleared", suspect))

    def buried(self, token: str, letter: Mapping[str, Any]) -> None:
        """The message goes to the dead letters."""
        self._burials.append((token, letter))

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._waiting.clear()
        self._ended.clear()
        self._burials.clear()

    def write(self, pipe: Any, worker: str) -> tuple[int, int]:
        """Adds commands to a pipeline; returns how many notes that are, for `sent`."""
        waiting, ended = self._waiting.copy(), self._ended.copy()
        running = self._keys.running(worker)
        for what, *rest in waiting:
            if what == "began":
                pipe.hset(running, *rest)
                pipe.expire(running, RUNNING_TTL_S)
            else:
                pipe.hdel(self._keys.suspects, *rest)
        if ended:
            pipe.hdel(running, *ended)
        return len(waiting), len(ended)

    def sent(self, notes: tuple[int, int]) -> None:
        """Forgets the oldest notes, which have arrived."""
        _drop_oldest(self._waiting, notes[0])
        _drop_oldest(self._ended, notes[1])

    def bury(self, scripts: Scripts, lease_key: str) -> None:
        """Moves what is condemned to the dead letters.

        Raises:
            redis.RedisError: Redis does not answer, or has no room; the rest goes on waiting.
        """
        keys = [lease_key, self._keys.dead, self._keys.dead_messages]
        while self._burials:
            token, letter = self._burials[0]
            scripts.run("bury", keys, token, json.dumps(letter))
            self._burials.popleft()


def _drop_oldest(queue: deque[Any], number: int) -> None:
    # Fewer may be left, if all were dropped meanwhile.
    for _ in range(min(number, len(queue))):
        queue.popleft()


def spell_id(task_id: str) -> str:
    """A task id as one word: anybody can send one with a space, or one that is no Unicode."""
    return task_id if PLAIN_ID.fullmatch(task_id) else quote(task_id, errors="surrogatepass")


def suspect_of(payload: Mapping[str, Any]) -> str:
    """The field among the suspects that a message would have, whatever is in its headers."""
    headers = payload.get("headers")
    return spell_id(str(headers.get("id"))) if isinstance(headers, Mapping) else ""
