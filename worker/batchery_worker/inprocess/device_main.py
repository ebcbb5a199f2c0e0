"""The device process of an engine: `python -m batchery_worker.inprocess.device_main`.

Its main thread computes; another one reads, so that a batch that waits can be prepared in between,
and so that the process ends with its parent even during a forward pass.
"""

import os
import queue
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from batchery.errors import BatcheryError, InvalidItem, ModelLoadError
from batchery_worker.device.log_forwarding import ForwardingHandler, forward_logs
from batchery_worker.device.signals import leave_signals_to_parent
from batchery_worker.inprocess.engine_messages import (
    BatchReply,
    EngineSetup,
    Loaded,
    NotLoaded,
    NotRead,
    SentBatch,
    dump,
    dump_reply,
    load,
    sendable_error,
)
from batchery_worker.inprocess.local_device import LocalDevice
from batchery_worker.ipc.framing import read_frame, write_frame


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch, or why it cannot be read."""

    number: int
    items: list[Any] = field(default_factory=list)
    keywords: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def _received(request: SentBatch) -> ReceivedBatch:
    try:
        items, keywords = load(request.content)
    except Exception as error:  # noqa: BLE001 - whatever the code of the items raises
        text = (
            f"the device process cannot read it: {type(error).__name__}: {error};"
            " define its class in a module that can be imported"
        )
        return ReceivedBatch(request.number, error=InvalidItem(text))
    return ReceivedBatch(request.number, items, keywords)


class BatchServer:
    """Answers batches until the parent closes the pipe."""

    def __init__(self, end: socket.socket, device: LocalDevice) -> None:
        self._end = end
        self._device = device
        self._received: queue.SimpleQueue[ReceivedBatch] = queue.SimpleQueue()
        #: Batches that were taken from that queue, in the order in which they run.
        self._ahead: deque[ReceivedBatch] = deque()

    def run(self) -> None:
        """Computes; never returns."""
        threading.Thread(target=self._read, name="batchery-reader", daemon=True).start()
        while True:
            batch = self._ahead.popleft() if self._ahead else self._received.get()
            if batch.error is not None:
                write_frame(self._end, dump(NotRead(batch.number, batch.error)))
                continue
            answer = self._device.run(batch.items, batch.keywords, self._look_ahead)
            reply = BatchReply(batch.number, answer, self._device.figures())
            write_frame(self._end, dump_reply(reply))

    def _look_ahead(self) -> tuple[list[Any], Mapping[str, Any]] | None:
        with suppress(queue.Empty):
            while True:
                self._ahead.append(self._received.get_nowait())
        if not self._ahead or self._ahead[0].error is not None:
            return None
        return self._ahead[0].items, self._ahead[0].keywords

    def _read(self) -> None:
        try:
            while True:
                self._received.put(_received(load(read_frame(self._end))))
        finally:
            # The parent is gone or ends this process. A forward pass may run: do not wait.
            os._exit(0)


def main(descriptor: int, log_descriptor: int) -> None:
    """Entry point.

    Args:
        descriptor: Of a socket to the parent.
        log_descriptor: Of another one, for what is logged.
    """
    leave_signals_to_parent()
    end = socket.socket(fileno=descriptor)
    try:
        setup: EngineSetup = load(read_frame(end))
    except EOFError:
        return
    log = socket.socket(fileno=log_descriptor)
    forward_logs(ForwardingHandler(setup.name, log, lambda: None), setup.log_levels)
    sys.path[:] = setup.sys_path
    try:
        device = LocalDevice(_load_model(setup))
        device.load()
    except Exception as error:  # noqa: BLE001 - for whoever started the engine
        write_frame(end, dump(NotLoaded(sendable_error(setup.name, error))))
        return
    write_frame(end, dump(Loaded(device.figures())))
    BatchServer(end, device).run()


def _load_model(setup: EngineSetup) -> Any:
    try:
        return load(setup.model)
    except BatcheryError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"model {setup.name!r}: its device process cannot read it: {type(error).__name__}:"
            f" {error}; define its class in a module that can be imported"
        ) from error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
