"""The processes that read items: one that has loaded what reading takes, and its forks.

A decoder may die of a picture, or never come back. So each reader has a pipe of its own, that no
other one writes to; the system ends it when its time is over, and a fresh one is forked in some
milliseconds, as nothing has to be imported again.
"""

import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from batchery.errors import InvalidItem
from batchery_worker.ipc.framing import read_frame, write_frame
from batchery_worker.ipc.lifetime import leave_signals_to_parent, open_pipe
from batchery_worker.media.fetching import describe
from batchery_worker.media.reader import Reader


class Asked(NamedTuple):
    """What a reader is asked."""

    #: Of its model.
    task: str
    data: bytes | str
    #: How long it may take, in seconds; then the process ends.
    limit_s: float


def main(descriptor: int) -> None:
    """Entry point: `python -m batchery_worker.media.reader_process DESCRIPTOR`.

    Args:
        descriptor: Of a socket to the device. By its first frame come the readers of all models,
            and then sockets, each for a reader to be forked.
    """
    leave_signals_to_parent()
    end = open_pipe(descriptor)
    with suppress(EOFError):
        readers: dict[str, Reader] = pickle.loads(read_frame(end))
        problems = {task: _open(reader) for task, reader in readers.items()}
        # Nobody waits for the forks: the system forgets them when they end.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            word, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            if not word:
                return
            if os.fork() == 0:
                end.close()
                _serve(socket.socket(fileno=descriptors[0]), readers, problems)
                os._exit(0)
            os.close(descriptors[0])


def _open(reader: Reader) -> str:
    """Opens a reader; what is wrong with it, empty for nothing."""
    try:
        reader.open()
    except Exception as error:  # noqa: BLE001 - the code of any library
        return describe(error)
    return ""


def _serve(end: socket.socket, readers: Mapping[str, Reader], problems: Mapping[str, str]) -> None:
    """Reads items until the device closes its end."""
    leave_signals_to_parent()
    # Where memory is short, this process goes before the device.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(EOFError, OSError):
        write_frame(end, b"")
        while True:
            asked: Asked = pickle.loads(read_frame(end))
            # Nothing handles the signal, so it ends the process, whatever that does.
            signal.setitimer(signal.ITIMER_REAL, asked.limit_s)
            answer = _read(readers[asked.task], problems[asked.task], asked)
            signal.setitimer(signal.ITIMER_REAL, 0)
            write_frame(end, pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))


def _read(reader: Reader, problem: str, asked: Asked) -> tuple[Any, str]:
    """What was made of an item, or why there is nothing."""
    if problem:
        return None, f"{reader.medium}: the model's files say not how to read it: {problem}"
    try:
        return reader.read_data(asked.data), ""
    except InvalidItem as error:
        return None, str(error)


if __name__ == "__main__":
    main(int(sys.argv[1]))
