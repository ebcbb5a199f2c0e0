"""An app whose batch functions start processes of their own, and await jobs."""

import atexit
import multiprocessing
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.result import allow_join_result

from batchery import BatchTask, install
from batchery_worker.device_pool import process as device_process
from support.patience import patient

app = install(Celery("households", set_as_current=False))
app.conf.worker_hijack_root_logger = False

#: What the receiver of `worker_process_shutdown` does after it has noted its call.
FAREWELL = os.environ.get("FAREWELL", "")


@signals.worker_init.connect
def wait_for_farewells(**_: Any) -> None:
    """However long a device stands still, it says farewell before it is killed."""
    if FAREWELL != "hang":
        device_process.LEAVE_TIMEOUT_S = patient(30)


def note(*words: object) -> None:
    with Path("farewells").open("a") as file:
        print(*words, file=file)


@signals.worker_process_init.connect
def prepare(sender: str | None, **_: Any) -> None:
    if sender is None:  # A device: processes of Celery's pool have a name.
        atexit.register(note, "atexit", os.getpid())


@signals.worker_process_shutdown.connect
def leave(sender: str | None, pid: int, exitcode: int, **_: Any) -> None:
    if sender is not None:
        return
    note("signal", pid, exitcode, threading.current_thread().name)
    if FAREWELL == "raise":
        raise LookupError("no farewell")
    if FAREWELL == "exit":
        raise SystemExit(3)
    if FAREWELL == "hang":
        time.sleep(600)


@app.task(shared=False)
def add(number: int, other: int) -> int:
    """Runs in a process of the ordinary pool."""
    return number + other


@app.task(shared=False, base=BatchTask)
def awaiting(items: list[bool]) -> list[int]:
    """Awaits a job of another process, and says before that it may, if the item says so."""
    job = add.delay(1, 2)
    if not all(items):
        return [job.get(timeout=patient(60)) for _ in items]
    with allow_join_result():
        return [job.get(timeout=patient(60)) for _ in items]


@app.task(shared=False, base=BatchTask)
def pid(pauses_s: list[float]) -> list[int]:
    time.sleep(sum(pauses_s))
    return [os.getpid() for _ in pauses_s]


@app.task(shared=False, base=BatchTask)
def end_command(numbers: list[int]) -> list[int]:
    """Ends a command by signals; answers its exit codes."""
    codes = []
    for number in numbers:
        process = subprocess.Popen(["sleep", "600"])
        process.send_signal(number)
        codes.append(process.wait(patient(30)))
    return codes


@app.task(shared=False, base=BatchTask)
def end_fork(numbers: list[int]) -> list[int | None]:
    """Ends forks of the device by signals; answers their exit codes."""
    codes = []
    for number in numbers:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(patient(30))
        codes.append(process.exitcode)
    return codes


@app.task(shared=False, base=BatchTask)
def pooled(methods: list[str]) -> list[list[int]]:
    """Computes in a pool of two processes."""
    answers = []
    for method in methods:
        with multiprocessing.get_context(method).Pool(2) as pool:
            answers.append(pool.map(abs, [-1, 2, -3]))
    return answers


@app.task(shared=False, base=BatchTask)
def loaded(counts: list[int]) -> list[list[int]]:
    """Loads numbers by processes of torch."""
    # The other devices of this app start sooner without it.
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    numbers = TensorDataset(torch.arange(8))
    loaders = [DataLoader(numbers, batch_size=2, num_workers=count) for count in counts]
    return [[int(part.sum()) for (part,) in loader] for loader in loaders]


@app.task(shared=False, base=BatchTask)
def leave_child(ways: list[str]) -> list[list[int]]:
    """Starts processes that outlive the device; answers its id, and theirs."""
    pids = []
    for way in ways:
        if way == "fork":
            child = os.fork()
            if not child:
                time.sleep(600)
                os._exit(0)
        else:
            child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
        pids.append(child)
    return [[os.getpid(), child] for child in pids]
