"""An app with batch tasks whose results lie on a cluster, and an ordinary one."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import BatchTask, Failed, Partial, install
from support.patience import patient

app = install(Celery("sharded", set_as_current=False))
app.conf.update(
    worker_hijack_root_logger=False,
    result_expires=1000,
    broker_transport_options={"lease_expiry_s": patient(1.5)},
)


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def count(numbers: list[int]) -> list[Any]:
    """Adds one; a number below 0 fails."""
    return [Failed(f"{each} is negative") if each < 0 else each + 1 for each in numbers]


@app.task(shared=False, base=BatchTask, max_batch_size=64, cache="1")
def note(items: list[list[str]]) -> list[str]:
    """Writes into a file, once for equal items."""
    for path, text in items:
        with Path(path).open("a") as file:
            file.write(text)
    return [text for _, text in items]


@app.task(shared=False, base=BatchTask, max_batch_size=8, track_started=True)
def wait(paths: list[str]) -> list[int]:
    """Computes until the files are there; answers how often it ran for each of them."""
    for path in paths:
        with Path(f"{path}.runs").open("a") as file:
            file.write("x")
        while not Path(path).exists():
            time.sleep(0.01)
    return [len(Path(f"{path}.runs").read_text()) for path in paths]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def spell(words: list[str]) -> Generator[Partial, None, list[str]]:
    """Yields the letters of all words in turn."""
    for position in range(max(map(len, words))):
        for index, word in enumerate(words):
            if position < len(word):
                yield Partial(index, word[position])
    return [word.upper() for word in words]


@app.task(shared=False)
def double(number: int) -> int:
    return 2 * number


@app.task(shared=False)
def add(numbers: list[int]) -> int:
    return sum(numbers)
