"""The device process of an engine, seen from the engine."""

import logging
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from batchery.errors import BatcheryError, DeviceDied, ModelLoadError
from batchery.fork_gate import fork_gate
from batchery.outcomes import Failed
from batchery_worker.device_pool.log_reading import follow_log
from batchery_worker.device_pool.process import LEAVE_TIMEOUT_S, describe_ending, start_interpreter
from batchery_worker.device_pool.startup import levels_of_loggers
from batchery_worker.inprocess.engine_messages import (
    BatchReply,
    EngineSetup,
    Loaded,
    NotLoaded,
    NotRead,
    SentBatch,
    dump,
    load,
)
from batchery_worker.inprocess.local_device import (
    BatchAnswer,
    EngineModel,
    LookAhead,
    is_same,
    show_origin,
)
from batchery_worker.ipc.framing import read_frame, write_frame

logger = logging.getLogger("batchery.device")


class SpawnedDevice:
    """Computes in a process of its own, which is started anew after it died."""

    #: The next process can compute again, whatever ended this one.
    problem = ""

    def __init__(self, model: EngineModel, start_timeout_s: float) -> None:
        """Starts no process yet.

        Args:
            model: To be pickled.
            start_timeout_s: How long the process may take to load the model, in seconds.
        """
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket
        self._figures: Mapping[str, Any] = {}
        self._number = 0
        #: The batch that was sent before its turn: its items, its keywords, its number.
        self._ahead: tuple[Sequence[Any], Mapping[str, Any], int] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    def load(self) -> None:
        """Starts the process, which loads the model.

        Raises:
            ModelLoadError: The model cannot be loaded or pickled, or the process died or took too
                long.
            DeviceUnavailable: The device does not exist.
        """
        setup = EngineSetup(self._model.name, sys.path, levels_of_loggers(), self._pickled())
        self._spawn()
        try:
            self._end.settimeout(self._start_timeout_s)
            write_frame(self._end, dump(setup))
            ready: Loaded | NotLoaded = load(read_frame(self._end))
            self._end.settimeout(None)
        except TimeoutError:
            self._stop(0.0)
            raise ModelLoadError(
                f"model {self._model.name!r}: its device process was not ready within"
                f" {self._start_timeout_s:g} s (setting device_start_timeout_s)"
            ) from None
        except (EOFError, OSError):
            ending = self._stop(LEAVE_TIMEOUT_S)
            raise ModelLoadError(
                f"model {self._model.name!r}: its device process died while it loaded: {ending}"
            ) from None
        if isinstance(ready, NotLoaded):
            self._stop(LEAVE_TIMEOUT_S)
            raise ready.error
        self._figures = ready.figures

    def run(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        """Computes one batch there; sends the next one before its turn if it is full already.

        Raises:
            DeviceDied: The process died. Halves of the batch may run in the next one. An item that
                was alone has had two processes, as the first may have died of something else.
            InvalidItem: The process cannot read the items.
            Exception: The items cannot be pickled.
        """
        try:
            return self._run_once(items, keywords, look_ahead)
        except DeviceDied:
            if len(items) > 1:
                raise
        return self._run_once(items, keywords, look_ahead)

    def _run_once(
        self, items: Sequence[Any], keywords: Mapping[str, Any], look_ahead: LookAhead
    ) -> BatchAnswer:
        try:
            self._revive()
        except BatcheryError as error:
            # Not raised: halves of the batch would try it again.
            return BatchAnswer([Failed(error) for _ in items], 0, 0)
        frame = None
        number, self._ahead = self._number_ahead(items, keywords), None
        if number is None:
            number = self._number = self._number + 1
            frame = _request(number, items, keywords)
        try:
            if frame is not None:
                write_frame(self._end, frame)
            self._send_ahead(look_ahead)
            reply = self._receive(number)
        except (EOFError, OSError):
            raise self._died() from None
        self._figures = reply.figures
        for each in reply.answer.outcomes:
            show_origin(each)
        return reply.answer

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` would show of the model, as the process told last."""
        return dict(self._figures)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._stop(LEAVE_TIMEOUT_S)

    def _pickled(self) -> bytes:
        try:
            return dump(self._model)
        except Exception as error:
            raise ModelLoadError(
                f"model {self._model.name!r}: it cannot be pickled for its device process"
                f" ({error}); load in `load` what cannot be pickled"
            ) from error

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        log, their_log = socket.socketpair()
        try:
            with theirs, their_log:
                self._process = start_interpreter(
                    "batchery_worker.inprocess.device_main", (theirs.fileno(), their_log.fileno())
                )
        except OSError as error:
            ours.close()
            log.close()
            raise ModelLoadError(
                f"model {self._model.name!r}: its device process cannot be started: {error}"
            ) from error
        follow_log(log)
        self._end = ours
        # A fork that held it open would keep the process alive when this one dies.
        fork_gate.keep_private(ours)

    def _revive(self) -> None:
        """Makes sure that there is a process: it may have died since, and nothing was lost then."""
        if self._process is not None and self._process.poll() is not None:
            self._died()
        if self._process is None:
            self.load()

    def _number_ahead(self, items: Sequence[Any], keywords: Mapping[str, Any]) -> int | None:
        """The number of these items if they were sent; the answer to any others is dropped."""
        if self._ahead is None:
            return None
        sent, same_keywords, number = self._ahead
        return number if keywords == same_keywords and is_same(items, sent) else None

    def _send_ahead(self, look_ahead: LookAhead) -> None:
        following = look_ahead()
        if following is None:
            return
        self._number += 1
        try:
            frame = _request(self._number, *following)
        except Exception:  # noqa: BLE001 - at its turn it fails by itself
            return
        write_frame(self._end, frame)
        self._ahead = (*following, self._number)

    def _receive(self, number: int) -> BatchReply:
        """Reads answers until that of a batch."""
        while True:
            reply: BatchReply | NotRead = load(read_frame(self._end))
            if reply.number != number:
                continue
            if isinstance(reply, NotRead):
                raise reply.error
            return reply

    def _died(self) -> DeviceDied:
        """Cleans up after the process."""
        ending = self._stop(LEAVE_TIMEOUT_S)
        text = f"{self._model.name}: its device process died: {ending}"
        logger.warning("%s; the next batch starts another one", text)
        return DeviceDied(text)

    def _stop(self, timeout_s: float) -> str:
        """Ends the process, by force after a timeout; returns how it ended."""
        process, self._process, self._ahead, self._figures = self._process, None, None, {}
        assert process is not None
        self._end.close()
        try:
            return describe_ending(process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            process.kill()
            return describe_ending(process.wait())


def _request(number: int, items: Sequence[Any], keywords: Mapping[str, Any]) -> bytes:
    return dump(SentBatch(number, dump((list(items), keywords))))
