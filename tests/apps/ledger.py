"""An app that notes every execution in a file, and tasks that misbehave in every way we know."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.backends.redis import RedisBackend

from batchery import BatchTask, Failed, install

app = install(Celery("ledger", set_as_current=False))
app.conf.worker_hijack_root_logger = False
app.conf.worker_soft_shutdown_timeout = float(os.environ.get("SOFT_SHUTDOWN_S", "0"))
app.conf.worker_pool_restarts = True
app.conf.broker_connection_retry_on_startup = True


#: The most that Redis takes are 512 MB. Tests that reach it need gigabytes: less will do.
MAX_BYTES = 120_000_000
RedisBackend._MAX_STR_VALUE_SIZE = MAX_BYTES  # type: ignore[attr-defined]


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def write_down(
    items: list[Any], *, ledger: str, pause_s: float = 0.0, gate: str | None = None
) -> list[Any]:
    """Notes each item when its batch begins; waits for a file that is the gate."""
    with open(ledger, "a") as file:
        file.write("".join(f"{item}\n" for item in items))
    time.sleep(pause_s)
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)
    return items


@app.task(shared=False)
def write_down_alone(item: Any, ledger: str, gate: str | None = None) -> Any:
    """An ordinary task, for comparison."""
    with open(ledger, "a") as file:
        file.write(f"{item}\n")
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)
    return item


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def answering(items: list[Any], *, answer: Any) -> Any:
    """Answers for a whole batch what no batch function may answer."""
    return answer


class Mute(Exception):
    """Cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Fussy(Exception):
    """Cannot be made again from its args."""

    def __init__(self, *, code: int) -> None:
        super().__init__(code, "fussy")


@dataclass(frozen=True)
class Frozen(Exception):
    """Refuses every attribute, also those that Python sets."""

    code: int


class Nosy(Exception):
    """Finds its attributes elsewhere, and nothing there."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Argless(Exception):
    """Even what every exception has is broken."""

    @property
    def args(self) -> Any:  # type: ignore[override]
        raise OSError("no args")


#: What may be raised, and returned as `Failed`.
ODD_ERRORS = {"frozen": Frozen(3), "nosy": Nosy("as told"), "argless": Argless("as told")}


def nested(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


@app.task(shared=False, base=BatchTask, max_batch_size=64)
def misbehave(texts: list[str]) -> Any:
    """Does what the texts say."""
    for text in texts:
        if text == "mute":
            raise Mute
        if text == "fussy":
            raise Fussy(code=3)
        if text.startswith("raise "):
            raise ODD_ERRORS[text.removeprefix("raise ")]

    def answer(text: str) -> Any:
        if text == "generator":
            raise LookupError("in the middle")
        if text in ("huge", "too huge"):
            return "x" * (100_000_000 if text == "huge" else MAX_BYTES + 1)
        if text.startswith("return "):
            return Failed(ODD_ERRORS[text.removeprefix("return ")])
        if text == "no error":
            return Failed(None)  # type: ignore[arg-type]
        return nested(10_000) if text == "deep" else text.upper()

    return (answer(text) for text in texts)


#: What a hook may raise. Some backends raise the same while they are away.
HOOK_ERRORS: dict[str, type[Exception]] = {
    "RuntimeError": RuntimeError,
    "KeyError": KeyError,
    "OSError": OSError,
    "MemoryError": MemoryError,
}


def _note_run(text: str) -> None:
    """Notes a run in the file that a text such as `fail KeyError runs.txt` names."""
    with open(text.split()[-1], "a") as file:
        file.write("run\n")


class Hooked(BatchTask):
    """Its hooks do what the item says."""

    name = "apps.ledger.hooked"
    max_batch_size = 64

    def run(self, texts: list[str]) -> list[str]:
        for text in texts:
            if text.startswith("fail"):
                _note_run(text)
                raise ValueError("as told")
        return texts

    def on_success(self, retval: str, task_id: str, args: Any, kwargs: Any) -> None:
        if retval.startswith("slow until "):
            while not Path(retval.removeprefix("slow until ")).exists():
                time.sleep(0.01)
        if retval == "on_success":
            raise RuntimeError("on_success is broken")

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        raise HOOK_ERRORS[args[0].split()[1]]("on_failure is broken")

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        if retval == "after_return":
            raise RuntimeError("after_return is broken")


hooked = app.register_task(Hooked())


@signals.worker_init.connect
def _define_late(**_: Any) -> None:
    """A task that only a worker's main process has: no import makes it."""

    @app.task(shared=False, base=BatchTask, name="apps.ledger.late")
    def late(items: list[Any]) -> list[Any]:
        return items


@signals.task_success.connect
def broken_receiver(result: Any, **_: Any) -> None:
    if result == "receiver":
        raise RuntimeError("the receiver is broken")


def executions(ledger: Path) -> list[str]:
    """What was executed so far, in order."""
    return ledger.read_text().split() if ledger.exists() else []
