"""The process that runs vLLM's engine, as the device sees it."""

import json
import logging
import os
import re
import select
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchery.errors import BatcheryError, ModelLoadError
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.ipc import framing
from batchery_worker.models.generation import vllm_child

logger = logging.getLogger("batchery.vllm")

#: How long the engine may take to end, in seconds; then it is killed.
END_TIMEOUT_S = 5.0

#: How long it may take once this process is gone. The next one needs its memory.
ORPHANED_S = 1.0

#: Variables that would lead another environment's Python to packages of this one.
FOREIGN = ("PYTHONPATH", "PYTHONHOME")

#: What vLLM needs to run beneath a process with threads. It must send nothing home unasked.
VARIABLES = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NO_USAGE_STATS": "1"}

#: The level of a line of vLLM's log.
LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")

#: A line that says what went wrong, at the end of a traceback, and those that only point to it.
CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+)")
POINTERS = ("See root cause", "See stack trace")


class VllmProcess:
    """vLLM's engine in a process of its own, with a Python of its own."""

    def __init__(self, python: str, setup: Mapping[str, Any], visible_gpus: str | None) -> None:
        """Starts it, and waits until the engine is ready.

        Args:
            python: Path of the interpreter that has vLLM.
            setup: `options` of vLLM, and `cache_tokens`.
            visible_gpus: Those that it may use, as `CUDA_VISIBLE_DEVICES`; None for all.

        Raises:
            ModelLoadError: It does not start; one line says why.
        """
        path = Path(python).expanduser()
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ModelLoadError(
                f"engine_python = {python!r}: there is no such program; name the Python of an"
                " environment that has vllm, such as /opt/vllm/bin/python"
            )
        end, theirs = socket.socketpair()
        with theirs:
            self._process = GuardedProcess(
                [str(path), vllm_child.__file__, str(theirs.fileno()), framing.__file__],
                grace_s=ORPHANED_S,
                environment=_environment(visible_gpus),
                keep_open=[theirs.fileno()],
                on_line=_log_line,
            )
        self._link = framing.Link(end)
        self._link.send(json.dumps(setup).encode())
        #: What the engine says of itself.
        self.facts: dict[str, Any] = self._wait_until_ready(python)

    def _wait_until_ready(self, python: str) -> dict[str, Any]:
        # The device's parent ends the wait if it takes too long.
        try:
            (answer,) = self._read(None)
        except EOFError:
            answer = {"error": ""}
        if "ready" in answer:
            return dict(answer["ready"])
        self._process.stop(END_TIMEOUT_S)
        cause = self._find_cause(answer["error"])
        raise ModelLoadError(f"engine vllm ({python}) does not start: {cause}")

    def send(self, *order: Any) -> None:
        """Sends an order; see `vllm_child`."""
        self._link.send(json.dumps(order).encode())

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Returns the events that have come; waits this long, in seconds, for the first.

        Raises:
            BatcheryError: The engine has died.
        """
        try:
            events = [event for frame in self._read(timeout_s) for event in frame]
        except EOFError:
            events = [{"died": ""}]
        for event in events:
            if "died" in event:
                code = self._process.stop(END_TIMEOUT_S)
                raise BatcheryError(
                    f"engine vllm: its process has ended with exit code {code}:"
                    f" {self._find_cause(event['died'])}"
                )
        return events

    def _read(self, timeout_s: float | None) -> list[Any]:
        while True:
            sent = self._link.flush()
            writers = [] if sent else [self._link.writer]
            readable, _, _ = select.select([self._link.reader], writers, [], timeout_s)
            if not readable and timeout_s is not None:
                return []
            frames = self._link.receive() if readable else []
            if frames or timeout_s is not None:
                return [json.loads(frame) for frame in frames]

    def _find_cause(self, stated: str) -> str:
        """Why the engine ended, in one line.

        vLLM's front end only points to the log of another process, which has the reason.
        """
        if stated and not any(each in stated for each in POINTERS):
            return stated
        for line in reversed(self._process.tail().splitlines()):
            found = CAUSE.search(line)
            if found and not any(each in line for each in POINTERS):
                return found[1]
        return stated or self._process.tail(1) or "it said nothing"

    def close(self) -> None:
        """Ends the engine, and waits until it has ended."""
        self._link.close()
        self._process.stop(END_TIMEOUT_S)


def _environment(visible_gpus: str | None) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    # Else files beside the script would hide packages of the same names.
    fixed = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if visible_gpus is not None:
        fixed["CUDA_VISIBLE_DEVICES"] = visible_gpus
    return {**VARIABLES, **ours, **fixed}


def _log_line(line: str) -> None:
    found = LEVEL.search(line[:80])
    logger.log(logging.getLevelName(found[1]) if found else logging.INFO, "%s", line)


def visible_gpus(device: str, options: Mapping[str, Any]) -> str | None:
    """Which GPUs the engine of a device may use.

    Args:
        device: As torch spells it.
        options: Of vLLM; an engine that spreads over several GPUs chooses them itself.

    Returns:
        A value for `CUDA_VISIBLE_DEVICES`; None to leave that variable as it is.
    """
    spread = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    kind, _, index = device.partition(":")
    if kind != "cuda" or any(options.get(name, 1) != 1 for name in spread):
        return None
    there: Sequence[str] = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    number = int(index or 0)
    return there[number] if number < len(there) and there[number] else str(number)
