"""How much of the code a lone job enters, and how much there is: both stay within what was reached.

Run with `-s` to see the figures. Who makes the road longer must say why, and raise the limit.
"""

import io
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from apps import shop
from conftest import StartWorker
from support.harness import TESTS, wait_for
from support.patience import patient

ROOT = TESTS.parent

#: Tokens that are no code.
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}

#: Of all files of common, producer and worker; docstrings are lines of code here. 5,300 lines of
#: them are text generation: slots, streams, three engines, routes of HTTP, attention on CUDA. 2,600
#: are operations: metrics and health, the doctor, users of Redis, versions. 2,800 are many models
#: and many devices: a pool of models, places, reloads, drains, devices of several parts, ONNX. What
#: a new user missed is 1,300: models of pydantic, signals of a device's children, what dead workers
#: hold, what cannot start without ending the rest, a worker of all queues for `batchery up`, what a
#: server behind a model gets and says, retries of changed files, misspelt options. What attackers
#: and those on call found is 1,000: queues that nobody serves, ages of jobs that do not say them,
#: messages that grow, pipelines of HTTP that nobody reads, errors whose own code raises. Steps of
#: text generation as CUDA graphs, and the benchmark of a step, are 300. What readings of the whole
#: product found is 550: streams with limits, a Redis that hangs, Sentinels, suspects of models that
#: have a device of their own, inputs that change or break in the middle, clients that are forked.
MAX_FILES = 312
MAX_LINES = 54_280


class Road(NamedTuple):
    """Files, functions and calls of ours in a worker and its device."""

    files: int
    functions: int
    calls: int


#: A sweep, a heartbeat or a timer may come in between, so the shortest of some jobs counts. Two
#: functions look for suspects of drained devices, and one begins a batch job beside ordinary ones.
MAX_ROAD = Road(files=58, functions=356, calls=480)
JOBS = 8


def code_lines(path: Path) -> int:
    """The lines of a file that hold a token."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def read(logs: Iterable[Path]) -> Road:
    """Reads what the processes of a worker have written down, and removes it."""
    calls = []
    for log in logs:
        for line in log.read_text().splitlines():
            file, function, _ = line.split("\t")
            # The heartbeat has a thread of its own, and nothing to do with jobs.
            if "membership" not in file:
                calls.append((file, function))
        log.unlink()
    return Road(len({file for file, _ in calls}), len(set(calls)), len(calls))


class Quiet:
    """Whether nothing was written since the last question."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: list[int] = []

    def __call__(self) -> bool:
        before, self._sizes = (
            self._sizes,
            [each.stat().st_size for each in sorted(self._folder.glob("road-*"))],
        )
        return bool(before) and before == self._sizes


def test_the_product_stays_as_small_as_it_is() -> None:
    files = [
        path
        for room in ("common", "producer", "worker")
        for path in (ROOT / room).rglob("*.py")
        if "build" not in path.parts and path.stat().st_size
    ]
    lines = sum(map(code_lines, files))
    print(f"{len(files)} files, {lines} lines")
    assert len(files) <= MAX_FILES
    assert lines <= MAX_LINES


def test_a_lone_job_enters_few_files_and_functions(
    start_worker: StartWorker, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = tmp_path / "road"
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    path = f"{TESTS / 'support' / 'road'}:{TESTS}"
    start_worker("apps.shop", env={"PYTHONPATH": path, "ROAD": str(switch)})
    roads = []
    for _ in range(JOBS):
        switch.touch()
        assert shop.shout.delay("hello").get(timeout=patient(60)) == "HELLO"
        wait_for(Quiet(tmp_path), "the worker has nothing to do")
        switch.unlink()
        roads.append(read(tmp_path.glob("road-*")))
    shortest = Road(*map(min, zip(*roads, strict=True)))
    print(shortest)
    assert all(value <= limit for value, limit in zip(shortest, MAX_ROAD, strict=True)), shortest
