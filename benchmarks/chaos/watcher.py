"""Reads results as they are stored: from Redis's announcements, and by looking."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from batchery.broker_url import is_cluster
from benchmarks.chaos.answers import Answers
from benchmarks.redis_clients import AWAY, connect, find_tag

PREFIX = "celery-task-meta-"

#: Pause between two looks at what is not answered, in seconds. Announcements are quicker, but
#: those made while the connection is down are lost.
LOOK_S = 1.0

#: Longest wait for an announcement, or before connecting again, in seconds.
WAIT_S = 0.2

#: After this part of the time for which results are kept, each is read once more.
AGAIN_PART = 0.5

#: Keys per MGET.
CHUNK = 500


class Watcher:
    """A thread that fills in answers until it is closed; Redis may go away meanwhile."""

    def __init__(self, url: str, clock: Callable[[], float], keep_s: int = 0) -> None:
        """Starts it.

        Args:
            url: Redis or cluster of the workers.
            clock: The one that the ledger goes by.
            keep_s: How long results are kept: one that has changed is found before it goes. 0 if
                they are all there until the final look.
        """
        self._again_s = keep_s * AGAIN_PART
        #: What was answered, to be read once more, the oldest first.
        self._again: deque[tuple[float, str]] = deque()
        self._clock = clock
        self.answers = Answers()
        self._url = url
        self._redis: Any = connect(url)
        self._lock = threading.Lock()
        self._open: dict[str, None] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-watcher", daemon=True)
        self._thread.start()

    def expect(self, task_ids: Iterable[str]) -> None:
        """Looks for these results from now on."""
        with self._lock:
            self._open.update((each, None) for each in task_ids if each not in self.answers.first)

    @property
    def unanswered(self) -> int:
        """How many expected results are missing."""
        return len(self._open)

    @property
    def answered(self) -> int:
        """How many results were seen."""
        return len(self.answers.first)

    def final_look(self) -> None:
        """Reads every result once more, so that one that has changed is found.

        Raises:
            RedisError: Redis does not answer.
            RedisClusterException: A cluster does not answer.
        """
        self._look([*self.answers.first, *self._open])

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                if is_cluster(self._url):
                    # Each node would announce its own.
                    self._look_on()
                else:
                    self._listen()
            except AWAY:
                self._closed.wait(WAIT_S)

    def _look_on(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._look_at_open()

    def _listen(self) -> None:
        with self._redis.pubsub(ignore_subscribe_messages=True) as announcements:
            announcements.psubscribe(f"{PREFIX}*")
            look_s = 0.0
            while not self._closed.is_set():
                if self._clock() >= look_s:
                    self._look_at_open()
                    look_s = self._clock() + LOOK_S
                if message := announcements.get_message(timeout=WAIT_S):
                    self._saw(message["channel"].decode()[len(PREFIX) :], message["data"])

    def _look_at_open(self) -> None:
        with self._lock:
            missing = list(self._open)
        self._look([*missing, *self._due_again()])

    def _due_again(self) -> list[str]:
        with self._lock:
            due = []
            while self._again and self._again[0][0] <= self._clock():
                due.append(self._again.popleft()[1])
        return due

    def _look(self, task_ids: list[str]) -> None:
        for start in range(0, len(task_ids), CHUNK):
            chunk = task_ids[start : start + CHUNK]
            keys = [find_tag(self._url, each) + PREFIX + each for each in chunk]
            # On a cluster one command for each slot.
            read = self._redis.mget_nonatomic if is_cluster(self._url) else self._redis.mget
            payloads = read(keys)
            for task_id, payload in zip(chunk, payloads, strict=True):
                if payload is not None:
                    self._saw(task_id, payload)

    def _saw(self, task_id: str, payload: bytes) -> None:
        with self._lock:
            is_first = self.answers.saw(task_id, payload, self._clock())
            if is_first and self._again_s:
                self._again.append((self._clock() + self._again_s, task_id))
            if task_id in self.answers.first:
                self._open.pop(task_id, None)
