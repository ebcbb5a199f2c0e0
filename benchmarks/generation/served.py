"""A Redis and a worker of our own, which may be killed and started again."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import psutil

from batchery_producer import Client
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.engine.worker import WORKER, devices_of
from benchmarks.venvs import child_environment

#: How long the first result may take: the model is loaded before it, in seconds.
START_S = 600.0

#: How long a worker may take to end, in seconds.
GRACE_S = 10.0

#: Pause between two looks for a process, in seconds.
LOOK_S = 0.02

APP = "benchmarks.generation.app"


class Served:
    """Jobs in a Redis, and one worker for them; both end with the block."""

    def __init__(
        self,
        models: Mapping[str, Any],
        device: str = "cpu",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            models: As in the settings.
            device: As torch spells it.
            options: Of `app.py`.
        """
        self._server = EmbeddedRedis()
        self._environment = child_environment(
            BATCHERY_MODELS=json.dumps(models),
            BATCHERY_DEVICES=device,
            GENERATION_OPTIONS=json.dumps(options or {}),
        )
        self._worker: GuardedProcess | None = None

    def __enter__(self) -> Self:
        self._server.start()
        self.start_worker()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._worker is not None:
            self._worker.stop(GRACE_S)
        self._server.stop()

    @property
    def url(self) -> str:
        """Redis for jobs and results."""
        return self._server.url

    @property
    def worker(self) -> GuardedProcess:
        """The worker that runs."""
        assert self._worker is not None
        return self._worker

    def start_worker(self) -> None:
        """Starts one, in the place of one that was killed."""
        command = [sys.executable, "-W", "ignore", "-m", "celery", "-A", APP]
        self._worker = GuardedProcess(
            [*command, "worker", *WORKER],
            env={**self._environment, "GENERATION_URL": self.url},
        )

    def wait_ready(self, task: str, item: Any, keywords: Mapping[str, Any]) -> None:
        """Waits for the first result.

        Raises:
            SystemExit: The worker ends before.
        """
        deadline_s = time.monotonic() + START_S
        with Client(self.url) as client:
            job = client.task(task).delay(item, **keywords)
            while not job.ready():
                if self.worker.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"the worker ended or is silent:\n{self.worker.tail()}")
                time.sleep(LOOK_S)
            job.get()

    def processes(self) -> Mapping[str, psutil.Process]:
        """By what they are for; with the device that runs now."""
        (device,) = self.devices()
        worker, redis = psutil.Process(self.worker.pid), psutil.Process(self._server.pid)
        return {"worker": worker, "device": device, "redis": redis}

    def devices(self) -> Sequence[psutil.Process]:
        """The device processes of the worker."""
        return devices_of(self.worker.pid)

    def kill_device(self) -> bool:
        """Kills it with signal 9; returns whether there was one."""
        devices = self.devices()
        for each in devices[:1]:
            each.kill()
        return bool(devices)

    def kill_worker(self) -> None:
        """Kills it with signal 9, and starts another one."""
        psutil.Process(self.worker.pid).kill()
        self.worker.wait(GRACE_S)
        self.start_worker()
