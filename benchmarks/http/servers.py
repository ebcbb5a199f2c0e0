"""The servers that are measured: ours with its Redis and worker, and infinity's own."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import psutil

from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis, free_port
from benchmarks.engine.systems import TORCH
from benchmarks.engine.worker import WORKER, devices_of
from benchmarks.http.load import HOST
from benchmarks.venvs import python_of

#: How long a server may take to answer, in seconds.
START_S = 180.0

#: How long one may take to end, in seconds.
GRACE_S = 10.0

#: Of all systems; infinity has no other budget.
BATCH_SIZE = 64

INFINITY = "infinity_emb[torch,server]==0.0.78"


class Server(Protocol):
    """A server that is measured."""

    name: str
    port: int
    path: str

    def pids(self) -> Mapping[str, int]:
        """Its processes, by what they are for."""

    def pause(self) -> None:
        """Takes no processor time until `go_on`, while another one is measured."""

    def go_on(self) -> None:
        """Serves again."""

    def stop(self) -> None:
        """Ends it."""


class Batchery:
    """Redis, a worker with one device, and the gateway."""

    name = "batchery serve"
    path = "/v1/embeddings"

    def __init__(self, model: Path) -> None:
        """Starts all of it, and waits until it answers."""
        self.port = free_port()
        self._stack = ExitStack()
        redis = EmbeddedRedis().start()
        self._stack.callback(redis.stop)
        models = {"embed": {"kind": "embedding", "model": str(model)}}
        environment = {
            **os.environ,
            "BATCHERY_REDIS_URL": redis.url,
            "BATCHERY_MODELS": json.dumps(models),
            "BATCHERY_MAX_BATCH_SIZE": str(BATCH_SIZE),
        }
        run = [sys.executable, "-W", "ignore", "-m"]
        worker = [*run, "celery", "-A", "batchery.app", "worker", *WORKER]
        serve = [*run, "batchery", "serve", "--port", str(self.port)]
        self._pids = {"redis": redis.pid}
        for name, command in (("worker", worker), ("gateway", serve)):
            process = GuardedProcess(command, env=environment)
            self._stack.callback(process.stop, GRACE_S)
            self._pids[name] = process.pid
        wait_ready(self)

    def pids(self) -> Mapping[str, int]:
        """The gateway, the worker's main process, its device, and Redis."""
        (device,) = devices_of(self._pids["worker"])
        return {**self._pids, "device": device.pid}

    def pause(self) -> None:
        """Nothing: it sleeps while nobody asks."""

    def go_on(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Ends all of it."""
        self._stack.close()


class Infinity:
    """infinity's server: its queue, its model and its HTTP in one process."""

    name = "infinity_emb 0.0.78"
    path = "/embeddings"

    def __init__(self, model: Path) -> None:
        """Starts it, and waits until it answers."""
        python = python_of((TORCH, INFINITY))
        self.port = free_port()
        self._process = GuardedProcess(
            [
                *(str(python.with_name("infinity_emb")), "v2", "--model-id", str(model)),
                *("--served-model-name", "embed", "--engine", "torch", "--device", "cpu"),
                *("--dtype", "float32", "--no-bettertransformer", "--no-compile"),
                *("--batch-size", str(BATCH_SIZE), "--host", HOST, "--port", str(self.port)),
                *("--log-level", "error"),
            ],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "DO_NOT_TRACK": "1",
                "INFINITY_ANONYMOUS_USAGE_STATS": "0",
            },
        )
        wait_ready(self)

    def pids(self) -> Mapping[str, int]:
        """Its one process."""
        return {"server": self._process.pid}

    def pause(self) -> None:
        """Stops it where it is: its threads look for work all the time."""
        psutil.Process(self._process.pid).suspend()

    def go_on(self) -> None:
        """Lets it go on."""
        psutil.Process(self._process.pid).resume()

    def stop(self) -> None:
        """Ends it."""
        self.go_on()
        self._process.stop(GRACE_S)


def wait_ready(server: Server) -> None:
    """Waits for the first vector.

    Raises:
        SystemExit: None came in time.
    """
    body = json.dumps({"model": "embed", "input": ["the first"]}).encode()
    request = urllib.request.Request(
        f"http://{HOST}:{server.port}{server.path}", body, {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            with opener.open(request, timeout=START_S) as answer:
                answer.read()
                return
        except urllib.error.HTTPError as error:
            # Its worker may take longer to start than requests may wait for one.
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise SystemExit(f"{server.name}: {error.code} {error.read()[:500]!r}") from error
            time.sleep(0.2)
        except (TimeoutError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{server.name}: no answer within {START_S:g} s")
