"""An app whose batch functions yield partial results."""

import os
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from celery import Celery

from batchery import (
    Advance,
    BatchTask,
    Failed,
    Partial,
    RetryAfter,
    StepModel,
    install,
    register,
)
from support.patience import patient

app = install(
    Celery("streaming", set_as_current=False), stream_grace_s=patient(5), stream_max_pieces=1000
)
app.conf.worker_hijack_root_logger = False
app.conf.broker_transport_options = {"lease_expiry_s": patient(1.5)}

#: How long a step takes, in seconds.
STEP_S = 0.005


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def spell(words: list[str], *, pause_s: float = 0.0) -> Generator[Partial, None, list[Any]]:
    """Yields the letters of all words in turn; a word with a `!` fails after its letters."""
    for position in range(max(map(len, words))):
        for index, word in enumerate(words):
            if position < len(word):
                yield Partial(index, word[position])
        time.sleep(pause_s)
    return [Failed("shouted") if "!" in word else word.upper() for word in words]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def explosive(words: list[str]) -> Generator[Partial, None, list[str]]:
    """Raises in the middle of a word with a `!`, whatever is in the batch with it."""
    for index, word in enumerate(words):
        for letter in word:
            if letter == "!":
                raise ValueError(word)
            yield Partial(index, letter)
    return [word.upper() for word in words]


@app.task(shared=False, base=BatchTask)
def wrong(items: list[str]) -> Generator[Partial, None, list[str]]:
    for item in items:
        yield Partial(len(items), 1) if item == "index" else Partial(0, object())
    return items


@app.task(shared=False, base=BatchTask, max_retries=3)
def second_time(paths: list[str]) -> Generator[Partial, None, list[Any]]:
    """Answers at the second attempt, with the same pieces and one more."""
    there = [Path(path).exists() for path in paths]
    for index, path in enumerate(paths):
        yield Partial(index, 1)
        yield Partial(index, 2)
        if there[index]:
            yield Partial(index, 3)
        Path(path).touch()
    return [len(path) if there[index] else RetryAfter(0) for index, path in enumerate(paths)]


@app.task(shared=False, base=BatchTask, max_batch_size=1)
def gated(paths: list[str]) -> Generator[Partial, None, list[int]]:
    """Yields numbers up to 10, and waits for a file after the fifth; then its process id."""
    (path,) = paths
    for number in range(10):
        yield Partial(0, number)
        while number == 4 and not Path(path).exists():
            time.sleep(0.01)
    return [os.getpid()]


@app.task(
    shared=False,
    base=BatchTask,
    track_started=True,
    time_limit=int(os.environ.get("STREAMING_LIMIT_S", "60")),
)
def limited(words: list[str], *, hangs: int | None = None) -> Generator[Partial, None, list[str]]:
    """Has a process hang, and yields letters; has a hard time limit."""
    if hangs is not None:
        os.kill(hangs, signal.SIGSTOP)
    for index, word in enumerate(words):
        for letter in word:
            yield Partial(index, letter)
    return words


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def flood(counts: list[int]) -> Generator[Partial, None, list[int]]:
    for index, count in enumerate(counts):
        for number in range(count):
            yield Partial(index, number)
    return counts


@app.task(shared=False, base=BatchTask, ignore_result=True)
def forgetful(items: list[Any]) -> Generator[Partial, None, list[Any]]:
    for index, item in enumerate(items):
        yield Partial(index, item)
    return items


@app.task(shared=False, base=BatchTask)
def silent(items: list[Any]) -> list[Any]:
    return items


@app.task(shared=False, base=BatchTask, cache="1")
def cached(words: list[str]) -> Generator[Partial, None, list[str]]:
    for index, word in enumerate(words):
        yield Partial(index, word)
    return [word.upper() for word in words]


@app.task(shared=False)
def shout(word: str) -> str:
    return word.upper()


class Speller(StepModel):
    """Each step is one letter of each text. A text goes on after the letters that were sent."""

    slots = 8

    def load(self, device: str) -> None:
        self.items: dict[int, dict[str, Any]] = {}

    def join(self, slot: int, prepared: str, pieces: Sequence[Any], **keywords: Any) -> None:
        self.items[slot] = {
            "text": prepared,
            "at": len(pieces),
            "resumed": "".join(pieces),
            **keywords,
        }

    def leave(self, slot: int) -> None:
        del self.items[slot]

    def step(self) -> list[Advance]:
        time.sleep(STEP_S)
        told = []
        for slot, item in list(self.items.items()):
            # Half of the text, then a gate.
            gate, text = item.get("gate"), item["text"]
            if gate and item["at"] >= len(text) // 2 and not Path(gate).exists():
                continue
            if item["at"] < len(text):
                told.append(Advance(slot, piece=text[item["at"]]))
                item["at"] += 1
                continue
            del self.items[slot]
            told.append(
                Advance(
                    slot, outcome={"text": text, "resumed": item["resumed"], "pid": os.getpid()}
                )
            )
        return told


speller = register(app, "speller", Speller)
