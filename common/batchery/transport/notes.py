"""What Redis is told beside acknowledgements: who is cleared, which marks go, what is buried."""

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from batchery.transport.keys import Keys
from batchery.transport.leases import Lease
from batchery.transport.scripts import Scripts

#: Ids that are written as they are; that of almost every job is one.
PLAIN_ID = re.compile(r"[\w.-]+", re.ASCII)


class Notes:
    """Written down at once, sent with the next acknowledgements: a round trip costs 0.1 ms."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        #: Fields among the suspects.
        self._cleared: deque[str] = deque()
        #: Keys of marks, see sending.py.
        self._marks: deque[str] = deque()
        #: Token and dead letter of each message that goes there in place of its acknowledgement.
        self._burials: deque[tuple[str, Mapping[str, Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether something is there that must not wait for the next acknowledgement."""
        return bool(self._cleared or self._marks or self._burials)

    def ended(self, lease: Lease) -> None:
        """The job is settled: nobody needs to know any more who died with it, or what it sent."""
        if lease.suspect is not None:
            self._cleared.append(lease.suspect)
        if lease.publish_tag is not None:
            self._marks.append(self._keys.sent(lease.publish_tag))

    def buried(self, token: str, letter: Mapping[str, Any]) -> None:
        """The message goes to the dead letters."""
        self._burials.append((token, letter))

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._cleared.clear()
        self._marks.clear()
        self._burials.clear()

    def write(self, pipe: Any) -> tuple[int, int]:
        """Adds commands to a pipeline; returns how many notes are in them, for `sent`."""
        cleared, marks = self._cleared.copy(), self._marks.copy()
        if cleared:
            pipe.hdel(self._keys.suspects, *cleared)
        if marks:
            pipe.delete(*marks)
        return len(cleared), len(marks)

    def sent(self, notes: tuple[int, int]) -> None:
        """Forgets the oldest notes, which have arrived."""
        for queue, number in zip((self._cleared, self._marks), notes, strict=True):
            # Fewer may be left, if all were dropped meanwhile.
            for _ in range(min(number, len(queue))):
                queue.popleft()

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


def spell_id(task_id: str) -> str:
    """A task id as one word: anybody can send one with a space, or one that is no Unicode."""
    return task_id if PLAIN_ID.fullmatch(task_id) else quote(task_id, errors="surrogatepass")


def suspect_of(payload: Mapping[str, Any]) -> str:
    """The field among the suspects that a message would have, whatever is in its headers."""
    headers = payload.get("headers")
    return spell_id(str(headers.get("id"))) if isinstance(headers, Mapping) else ""
