"""How exactly classes get their shares of a device, with and without feeders.

Jobs of three priorities wait in Redis, more of each than are done in the time. Each class's part is
what has been answered between two looks: after the start, and before the first list is short.

    python -m benchmarks.scheduling.shares --feeders 4 --jobs 20000 --json shares.json
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.engine.target import about, model_parser, target_for
from benchmarks.engine.texts import read_texts
from benchmarks.engine.worker import WholeSystem
from benchmarks.hardware import write_report
from benchmarks.rows import print_table

#: The classes and their first priorities.
CLASSES = {"high": 0, "normal": 3, "low": 6}

#: Parts of the jobs of the largest class that are done before the first look, and at the last one.
FIRST, LAST = 0.1, 0.9

#: Pause between two looks, in seconds.
LOOK_S = 0.1

WORKLOAD, TEXTS = "uniform 16", 2048


def measure(system: WholeSystem, texts: Sequence[str], jobs: int) -> dict[str, Any]:
    """Parts of the classes in per cent, and texts a second."""
    many = [texts[number % len(texts)] for number in range(jobs)]
    results = []
    staged, lists = list[str](), list[str]()
    for name, priority in CLASSES.items():
        ids = system.publish(name, many, priority=priority)
        results.append([f"celery-task-meta-{each}" for each in ids])
        step = f"\x06\x16{priority}" if priority else ""
        staged.append(name + step)
        lists.append("embed" + step)
    redis = system.redis
    with redis.pipeline() as publish:
        for own, name in zip(staged, lists, strict=True):
            publish.rename(own, name)
        publish.execute()
    first = wait_done(redis, results, jobs * FIRST)
    began_s = time.perf_counter()
    last = wait_done(redis, results, jobs * LAST)
    seconds = time.perf_counter() - began_s
    redis.delete(*lists)
    done = [then - before for before, then in zip(first, last, strict=True)]
    parts = [round(100 * each / sum(done), 1) for each in done]
    return {**dict(zip(CLASSES, parts, strict=True)), "texts_per_s": round(sum(done) / seconds)}


def wait_done(redis: Any, results: Sequence[Sequence[str]], count: float) -> list[int]:
    """Waits until so many jobs of a class are answered; returns how many are of each."""
    while True:
        done = [redis.exists(*keys) for keys in results]
        if max(done) >= count:
            return done
        time.sleep(LOOK_S)


def main() -> None:
    """Measures, prints a table; writes JSON if asked to."""
    parser = model_parser(__doc__)
    parser.add_argument("--feeders", type=int, default=0, help="of the device")
    parser.add_argument("--jobs", type=int, default=20_000, help="of each class")
    options: argparse.Namespace = parser.parse_args()
    with target_for(options) as target:
        texts = read_texts(WORKLOAD, TEXTS, target.folder)
        report = about(target, options, {WORKLOAD: texts})
        system = WholeSystem(target, options.feeders)
        try:
            system.wait_ready()
            row = {"feeders": options.feeders, **measure(system, texts, options.jobs)}
        finally:
            system.stop()
    print(report["hardware"])
    print_table(row, [map(str, row.values())])
    write_report(options.json, {**report, "rows": [row]})


if __name__ == "__main__":
    main()
