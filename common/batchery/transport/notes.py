"""What Redis is told beside acknowledgements: who is cleared, what is buried, which marks go."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any
from urllib.parse import quote

from batchery.transport.keys import Keys
from batchery.transport.scripts import Scripts

#: Ids that are written as they are; that of almost every job is one.
PLAIN_ID = re.compile(r"[\w.-]+", re.ASCII)

#: Most jobs of one script; Redis answers nobody else meanwhile.
COMPLETED_PER_SCRIPT = 500


class Notes:
    """Written down at once, sent with the next acknowledgements: a round trip costs 0.1 ms."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        #: Fields among the suspects.
        self._cleared: deque[str] = deque()
        #: Token of each message that is acknowledged together with its marks, and their key.
        self._completed: deque[tuple[str, str]] = deque()
        #: Token and dead letter of each message that goes there in place of its acknowledgement.
        self._burials: deque[tuple[str, Mapping[str, Any]]] = deque()

    def __bool__(self) -> bool:
        """Whether something is there that must not wait for the next acknowledgement."""
        return bool(self._cleared or self._completed or self._burials)

    def cleared(self, suspect: str) -> None:
        """The job is settled: nobody needs to know any more who died with it."""
        self._cleared.append(suspect)

    def take_cleared(self) -> list[str]:
        """Who is cleared and was not told; whoever takes them tells it."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._cleared.popleft())
        return taken

    def completed(self, token: str, publish_tag: str) -> None:
        """The message is acknowledged, and what its job has sent need not be remembered."""
        self._completed.append((token, self._keys.sent(publish_tag)))

    def buried(self, token: str, letter: Mapping[str, Any]) -> None:
        """The message goes to the dead letters."""
        self._burials.append((token, letter))

    def drop(self) -> None:
        """Forgets what was not sent: its worker is no more."""
        self._cleared.clear()
        self._completed.clear()
        self._burials.clear()

    @contextmanager
    def told_by(self, pipe: Any) -> Iterator[None]:
        """Adds a command to a pipeline that is run within; what does not arrive goes on waiting."""
        cleared = self.take_cleared()
        if cleared:
            pipe.hdel(self._keys.suspects, *cleared)
        try:
            yield
        except BaseException:
            self._cleared.extend(cleared)
            raise

    def complete(self, scripts: Scripts, lease_key: str) -> None:
        """Acknowledges what waits for it with its marks.

        Raises:
            redis.RedisError: Redis does not answer; it goes on waiting.
        """
        while some := list(islice(self._completed.copy(), COMPLETED_PER_SCRIPT)):
            tokens, marks = zip(*some, strict=True)
            scripts.run("complete", [lease_key, *marks], *tokens)
            for _ in some:
                self._completed.popleft()

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
