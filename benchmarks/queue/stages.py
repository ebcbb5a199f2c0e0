"""Where a no-op job's microseconds go: a worker's processor time, by stage.

A sampling profiler looks at a worker that empties a full queue; each sample counts for the
innermost function of the tables below that is on the stack. The shares are multiplied by the
processor time that the operating system counts per job: the profiler's own pace does not matter.

    python -m benchmarks.queue.stages --jobs 60000 --json benchmarks/results/stages.json
"""

import argparse
import json
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.hardware import hardware
from benchmarks.queue.memory import is_device
from benchmarks.queue.runs import Bench
from benchmarks.queue.systems import System, batchery
from benchmarks.venvs import python_of

PROFILER = ("py-spy==0.4.2",)

#: Samples per second.
RATE = 400

#: Function and file -> stage, for the main process and for the device.
MAIN = {
    "on_readable (batchery/transport/poller.py": "read the fetch's answer",
    "_brpop_start (batchery/transport/channel.py": "ask for the next fetch",
    "flush (batchery/transport/poller.py": "acknowledgements and notes",
    "_read (batchery/transport/inbox.py": "decode envelopes",
    "_deliver (batchery/transport/inbox.py": "make kombu's message",
    "guarded (batchery_worker/consumer.py": "check the message",
    "task_message_handler (celery/worker/strategy.py": "Celery's strategy",
    "__init__ (batchery_worker/request.py": "Celery's request",
    "apply_async (batchery_worker/pool.py": "admit",
    "_dispatch (batchery_worker/dispatch/dispatcher.py": "form batches",
    "context (batchery_worker/commit/eligibility.py": "grant the commit",
    "began (batchery/transport/lease_store.py": "note what runs",
    "send (batchery_worker/device_pool/supervisor.py": "send the batch",
    "add (batchery_worker/in_flight.py": "accept: Celery's state, events",
    "_on_readable (batchery_worker/device_pool/supervisor.py": "read the device's answer",
    "_on_done (batchery_worker/dispatch/dispatcher.py": "settle",
    "on_success (celery/worker/request.py": "succeed: Celery's state, events",
    "_publish (batchery_worker/events.py": "send events",
}
WAITING = "poll (kombu/utils/eventio.py"
DEVICE = {
    "read_frame (batchery_worker/ipc/framing.py": "read the batch",
    "_prepare (batchery_worker/device/__main__.py": "prepare",
    "_forward (batchery_worker/device/__main__.py": "forward: the function",
    "answer (batchery_worker/device/reply.py": "encode results",
    "_run (batchery_worker/commit/committer.py": "commit",
    "dump_reply (batchery_worker/ipc/messages.py": "send the answer",
    "write_frame (batchery_worker/ipc/framing.py": "send the answer",
}


class Profile(Bench):
    """Empties a queue under a profiler."""

    def stages(self, system: System, jobs: int) -> list[dict[str, Any]]:
        """Rows of process, stage and microseconds per job, the most expensive first."""
        self._redis.flushall()
        self._client(system, "fill", jobs)
        with tempfile.TemporaryDirectory() as folder, self._worker(system) as worker:
            self._wait(system, worker, jobs // 10)
            (device,) = (each for each in worker.children(True) if is_device(each))
            processes = ((worker, "main", MAIN), (device, "device", DEVICE))
            begun = [own_cpu_s(process) for process, _, _ in processes]
            before = self._done(system)
            stacks = [Path(folder, name) for _, name, _ in processes]
            profilers = [
                profiler(process.pid, path)
                for (process, _, _), path in zip(processes, stacks, strict=True)
            ]
            self._wait(system, worker, jobs * 9 // 10)
            counted = self._done(system) - before
            used = [own_cpu_s(process) for process, _, _ in processes]
            rows = []
            for at, (_, name, table) in enumerate(processes):
                profilers[at].send_signal(signal.SIGINT)
                profilers[at].wait()
                if not stacks[at].is_file():
                    raise SystemExit(
                        "py-spy saw nothing: it may need root, or kernel.yama.ptrace_scope=0"
                    )
                # The profiler does not stop what it reads: a name may be half of another one.
                text = stacks[at].read_text(encoding="utf-8", errors="replace")
                samples = classify(text.splitlines(), table)
                us = (used[at] - begun[at]) / counted * 1e6
                rows += shares(name, samples, us)
        return rows


def own_cpu_s(process: psutil.Process) -> float:
    """Processor time of one process, without its children, in seconds."""
    return float(sum(process.cpu_times()[:2]))


def profiler(pid: int, stacks: Path) -> subprocess.Popen[bytes]:
    """Watches a process until it is interrupted; writes the stacks that it saw to a file."""
    binary = python_of("py-spy", PROFILER).with_name("py-spy")
    options = ["--format", "raw", "--rate", str(RATE), "--duration", "unlimited", "--nonblocking"]
    command = [str(binary), "record", "--pid", str(pid), *options, "--output", str(stacks)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def classify(lines: Iterable[str], table: dict[str, str]) -> Counter[str]:
    """Counts samples by stage; a line is a stack, outermost first, and how often it was seen."""
    samples: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        if not (stack and count.isdigit()):
            continue  # A word of the profiler's own, or nothing that it could read.
        if stack.rpartition(";")[2].startswith(WAITING):
            continue  # No processor time, though the profiler may not see that.
        for frame in reversed(stack.split(";")):
            stage = next((table[key] for key in table if frame.startswith(key)), None)
            if stage:
                break
        samples[stage or "the rest: event loop, interpreter"] += int(count)
    return samples


def shares(process: str, samples: Counter[str], us: float) -> list[dict[str, Any]]:
    """Turns samples into microseconds per job, of a process that used so many altogether."""
    total = samples.total() or 1
    return [
        {"process": process, "stage": stage, "us_per_job": round(us * count / total, 1)}
        for stage, count in samples.most_common()
    ]


def main() -> None:
    """Profiles a worker, with task events if asked to; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=60_000)
    parser.add_argument("--events", action="store_true", help="as Flower needs them")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    events = ("-E",) if options.events else ()
    system = batchery("batchery", *events, transport="batchery")
    with EmbeddedRedis() as server:
        rows = Profile(server, options.jobs, calls=0).stages(system, options.jobs)
    table = Table("process", "stage", "µs per job")
    for row in rows:
        table.add_row(row["process"], row["stage"], f"{row['us_per_job']:.1f}")
    Console(highlight=False).print(hardware(), table)
    if options.json:
        report = {"hardware": hardware(), "events": options.events, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
