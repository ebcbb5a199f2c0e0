"""Real worker processes for tests."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from celery import Celery
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from batchery.transport.redis_schema import split_list, tenant_lists
from support.patience import patient

T = TypeVar("T")

TESTS = Path(__file__).resolve().parents[1]

#: What kombu puts between a queue and a priority.
SEP = "\x06\x16"

#: Has processes of tests start faster.
STARTUP = str(TESTS / "support" / "startup")

#: Python's path in processes of tests that need apps of tests.
PYTHONPATH = os.pathsep.join([STARTUP, str(TESTS)])

#: Generous, for a slow machine that compiles everything for the first time, and loads torch.
START_S = patient(90.0)


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = patient(30.0)) -> T:
    """Waits until a condition is true; returns its value.

    Raises:
        AssertionError: It was not true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)
    return value


@contextmanager
def open_redis(url: str, **options: Any) -> Iterator[Any]:
    """A client of a Redis; its answers have no types, as redis-py has those of its async client."""
    with Redis.from_url(url, **options) as client:
        yield client


def ask(app: Celery, command: str, names: list[str]) -> Any:
    """Asks workers by `celery inspect`; None if none answers.

    kombu pools connections by URL, and an earlier test may have cut one of them.
    """
    try:
        return getattr(app.control.inspect(names, timeout=5), command)()
    except RedisConnectionError:
        return None


def queue_length(redis_url: str, queue: str | None = None) -> int:
    """The number of messages in a queue's list of a priority, and in those of its tenants.

    Args:
        redis_url: The broker.
        queue: None for all queues.
    """
    with open_redis(redis_url) as redis:
        if queue is not None:
            return sum(int(redis.llen(each)) for each in _lists_of(queue))
        lists = set(redis.scan_iter(_type="list", count=1000))
        return sum(int(redis.llen(each)) for each in lists if not is_reply(each))


def is_reply(key: bytes) -> bool:
    """Whether a list has answers of remote control."""
    return b"pidbox" in key or b"celeryev" in key


def messages_in(redis: Any, queue: str) -> list[Any]:
    """These messages, as text."""
    return [each for key in _lists_of(queue) for each in redis.lrange(key, 0, -1)]


def _lists_of(queue: str) -> list[str]:
    name, step = split_list(queue, SEP)
    names = tenant_lists(name, SEP)
    return [queue, *(f"{each}{SEP}{step}" if step else each for each in names)]


def unsettled(redis_url: str) -> int:
    """The number of messages that workers hold, by a lease or in kombu's own way."""
    with open_redis(redis_url) as redis:
        return int(redis.hlen("unacked")) + leased(redis_url)


def leased(redis_url: str) -> int:
    """The number of messages that devices hold."""
    with open_redis(redis_url) as redis:
        return sum(int(redis.hlen(key)) for key in redis.keys("batchery:lease:*"))


@contextmanager
def device_busy(worker: "Worker", app: Celery, until: str, gate: Path) -> Iterator[Any]:
    """Keeps a worker's only device busy in the block; what is sent meanwhile waits.

    Args:
        worker: Where it runs.
        app: It sends the job that keeps the device busy.
        until: Name of the batch task that computes until there is a file.
        gate: The file.
    """
    job = app.send_task(until, [str(gate)])

    def active() -> list[str]:
        return [each["id"] for each in worker.inspect(app, "active")]

    try:
        # A job before has its result; the worker may not have settled it yet.
        wait_for(lambda: active() == [job.id], "the device is busy with this job alone")
        yield job
    finally:
        gate.touch()


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float = patient(30.0)) -> None:
    """Waits until processes have ended, even if nobody has reaped them yet."""
    pids = [each.pid for each in processes]
    wait_for(lambda: all(map(has_ended, pids)), f"{pids} have ended", timeout_s)


def kill_all(process: "subprocess.Popen[bytes]") -> None:
    """Kills a process and all that it has started, if it runs."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        wait_ended(family)


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if nobody has reaped it yet."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


class Worker:
    """A `celery worker` process."""

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        app: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        is_alone: bool = True,
    ) -> None:
        """Starts one; unless `is_alone`, it looks for its neighbours first, as Celery does."""
        self.log_file = directory / f"worker-{time.monotonic_ns()}.log"
        # A file, because `python -m` would put the directory on the path.
        celery = [sys.executable, str(TESTS / "support" / "celery_command.py")]
        command = [*celery, "-A", app, "worker", "-l", "INFO"]
        command += ["-n", f"{self.log_file.stem}@test"]
        if is_alone:
            command += ["--without-mingle", "--without-gossip"]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=cwd or directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    # Tests may run as root in containers, of which Celery warns.
                    "PYTHONWARNINGS": "ignore",
                    "CELERY_BROKER_URL": redis_url,
                    "CELERY_RESULT_BACKEND": redis_url,
                    **(env or {}),
                },
            )

    @property
    def log(self) -> str:
        """The output of the worker and its devices."""
        return self.log_file.read_text(errors="replace")

    @property
    def name(self) -> str:
        """The worker's node name."""
        return f"{self.log_file.stem}@test"

    @property
    def pid(self) -> int:
        """Process id of the main process."""
        return self.process.pid

    def devices(self) -> list[psutil.Process]:
        """The device processes that are alive."""
        children = psutil.Process(self.pid).children()
        return [each for each in children if "batchery_worker.device" in command_line(each)]

    def inspect(self, app: Celery, command: str) -> Any:
        """This worker's answer to a `celery inspect` command."""
        # So it is asked again: a worker that has just become ready may not listen yet.
        return wait_for(lambda: ask(app, command, [self.name]), f"an answer to {command}", START_S)[
            self.name
        ]

    def batches_in_flight(self, app: Celery) -> int:
        """The number of batches on its only device."""
        (device,) = self.inspect(app, "stats")["pool"]["devices"].values()
        return int(device["batches_in_flight"])

    def has_logged(self, text: str, times: int) -> bool:
        """Whether the log has a text at least this many times."""
        return self.log.count(text) >= times

    def wait_ready(self) -> "Worker":
        """Waits until the worker consumes, and has its models."""

        def ready() -> bool:
            assert self.process.poll() is None, f"worker ended:\n{self.log}"
            log = self.log
            loads = "; their jobs wait" in log and "models are ready" not in log
            return " ready." in log and not loads

        try:
            wait_for(ready, "worker ready", START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    def wait_answers(self, app: Celery) -> "Worker":
        """Waits until it hears what is asked of all workers: it may be ready before that."""
        self.inspect(app, "ping")
        return self

    def wait_known(self, redis_url: str) -> "Worker":
        """Waits until Redis has its name: commands look for it no longer than a second before."""
        with open_redis(redis_url) as redis:
            wait_for(
                lambda: self.name.encode() in b"".join(redis.hvals("batchery:worker-info")),
                f"{self.name} is known",
            )
        return self

    def wait_exit(self, timeout_s: float = patient(60.0)) -> int:
        """Waits for the end of the process; returns its exit code."""
        return self.process.wait(timeout_s)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ends the worker by a signal; returns its exit code."""
        self.process.send_signal(number)
        return self.wait_exit()

    def kill(self) -> None:
        """Kills the worker; its child processes end by themselves, or are killed as well."""
        if self.process.poll() is None:
            children = psutil.Process(self.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            # Celery's beat would go on, and send its ticks into the tests that follow.
            end_all(children)


def end_all(processes: list[psutil.Process]) -> None:
    """Waits for processes that should end by themselves; kills those that do not."""
    with suppress(AssertionError):
        wait_ended(processes, patient(20))
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def command_line(process: psutil.Process) -> str:
    """How a process was started; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
