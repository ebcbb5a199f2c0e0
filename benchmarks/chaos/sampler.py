"""Looks every few seconds at what the system holds on to: memory, descriptors, keys."""

import contextlib
import re
import sys
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from redis import Redis
from redis.exceptions import RedisError

from batchery.transport.dead_letters import DeadLetters
from batchery_worker.devstack.guarded_process import GuardedProcess
from benchmarks.chaos.families import Families
from benchmarks.chaos.flatness import Growth, Sample, compare
from benchmarks.chaos.tasks import BATCH_TASKS, QUEUE

#: Pause before another look after one that Redis did not answer, in seconds.
AGAIN_S = 1.0

#: How long the exporter may take to answer, in seconds.
SCRAPE_S = 10.0

#: How to count the members of a key, by its type.
COUNTS = {b"hash": "hlen", b"list": "llen", b"set": "scard", b"zset": "zcard", b"stream": "xlen"}

#: Families of strings, each of which is one member; no type is asked for.
STRINGS = ("celery-task-meta-*", "celery-taskset-meta-*")


class Exporter:
    """`batchery exporter` beside the workers; whoever watches must not grow either."""

    def __init__(self, folder: Path) -> None:
        """Starts it.

        Args:
            folder: Where the module `chaos_app` is.
        """
        self._url = ""
        #: How often it did not answer.
        self.failed = 0
        program = str(Path(sys.executable).with_name("batchery"))
        self._process = GuardedProcess(
            [program, "exporter", "-A", "chaos_app", "--port", "0"],
            cwd=folder,
            on_line=self._on_line,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def scrape(self) -> None:
        """Asks it for its metrics, as Prometheus does."""
        try:
            with urllib.request.urlopen(self._url, timeout=SCRAPE_S) as answer:
                answer.read()
        except (OSError, ValueError):
            self.failed += 1

    def close(self) -> None:
        """Ends it."""
        self._process.kill()

    def _on_line(self, line: str) -> None:
        if found := re.search(r"http://\S+", line):
            self._url = found[0]


class Sampler:
    """A thread that takes samples until it is closed; Redis may go away meanwhile."""

    def __init__(
        self,
        url: str,
        processes: Callable[[], list[tuple[str, int]]],
        exporter: Exporter,
        *,
        every_s: float,
        keep_s: int,
    ) -> None:
        """Starts it.

        Args:
            url: Redis of the workers.
            processes: Role and process id of all that runs; called in the thread.
            exporter: Asked for its metrics before each sample.
            every_s: Time between two samples.
            keep_s: Dead letters are deleted when they are older, as by somebody who has read them;
                0 for never.
        """
        self.samples: list[Sample] = []
        #: Some keys that no family has.
        self.unknown: set[str] = set()
        self._families = Families(QUEUE, *BATCH_TASKS)
        self._redis: Any = Redis.from_url(url, socket_timeout=5)
        self._processes = processes
        self.exporter = exporter
        self._every_s = every_s
        self._keep_s = keep_s
        self._begun_s = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-sampler", daemon=True)
        self._thread.start()

    @property
    def growth(self) -> list[Growth]:
        """What has become of each figure."""
        return compare(self.samples, self._is_judged)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()
        self._redis.close()

    def _run(self) -> None:
        wait_s = self._every_s
        while not self._closed.wait(wait_s):
            wait_s = AGAIN_S
            self.exporter.scrape()
            with contextlib.suppress(RedisError, OSError):
                figures = {**self._measure_redis(), **self._measure_processes()}
                now_s = time.monotonic() - self._begun_s
                self.samples.append(Sample(round(now_s, 1), figures))
                wait_s = self._every_s - now_s % self._every_s

    def _measure_processes(self) -> dict[str, float]:
        found = defaultdict(list)
        for role, pid in [*self._processes(), ("exporter", self.exporter.pid)]:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                found[f"{role}: resident bytes"].append(process.memory_info().rss)
                found[f"{role}: descriptors"].append(process.num_fds())
        return {name: median(values) for name, values in found.items()}

    def _measure_redis(self) -> dict[str, float]:
        self._delete_old_letters()
        keys, counted = Counter[str](), []
        for key in self._redis.scan_iter(count=1000):
            name = key.decode(errors="replace")
            family = self._families.find(name)
            if family is None:
                self.unknown.add(name)
            else:
                keys[f"{family} keys"] += 1
                if family not in STRINGS:
                    counted.append((family, key))
        memory = self._redis.info("memory")
        return {
            **keys,
            **self._count_members(counted),
            "redis: used memory, bytes": memory["used_memory"],
            "redis: data, bytes": memory["used_memory_dataset"],
        }

    def _count_members(self, counted: list[tuple[str, bytes]]) -> dict[str, int]:
        members = Counter[str]()
        with self._redis.pipeline(transaction=False) as pipe:
            for _, key in counted:
                pipe.type(key)
            kinds = pipe.execute()
            some = [(*each, kind) for each, kind in zip(counted, kinds, strict=True)]
            some = [each for each in some if each[2] in COUNTS]
            for _, key, kind in some:
                getattr(pipe, COUNTS[kind])(key)
            # A key may have become one of another type meanwhile.
            for (family, _, _), count in zip(some, pipe.execute(False), strict=True):
                if isinstance(count, int):
                    members[f"{family} members"] += count
        return members

    def _delete_old_letters(self) -> None:
        if self._keep_s:
            letters = DeadLetters(self._redis)
            oldest_s = time.time() - self._keep_s
            letters.purge([each.token for each in letters if each.died_s < oldest_s])

    def _is_judged(self, figure: str) -> bool:
        family, _, what = figure.rpartition(" ")
        return what != "members" or not self._families.counts_jobs(family)
