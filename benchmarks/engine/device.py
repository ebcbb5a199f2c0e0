"""Our device process fed directly: batches over its pipe, with no Redis and no Celery worker."""

import itertools
import json
import logging
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from batchery_worker.device_pool.process import DeviceProcess
from batchery_worker.ipc.messages import Done, NotReady, Ready, Reply, Setup, Work
from batchery_worker.job import DEVICE_DEPTH
from benchmarks.engine.sample import Sample, cpu_by_name, cpu_since
from benchmarks.engine.target import Target

APP = "batchery.app:app"
TASK = "embed"

#: Where the device reads which models there are; `configure` sets it.
MODELS = "BATCHERY_MODELS"


def start(end: socket.socket) -> "subprocess.Popen[bytes]":
    """Starts a device process that is fed by a pipe, given its end of that."""
    with end:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine.fed_device", str(end.fileno())],
            pass_fds=(end.fileno(),),
            stdin=subprocess.DEVNULL,
        )


class DirectDevice:
    """A device process, and this process in the place of a worker."""

    name = "device, fed directly"

    #: Where its tasks are, and how many batches it has at a time.
    app = APP
    depth = DEVICE_DEPTH

    def __init__(self, target: Target) -> None:
        """Starts it, without waiting for its model."""
        self._target = target
        self._ids = itertools.count(1)
        setup = Setup(
            device=target.device,
            sys_path=sys.path,
            app=self.app,
            modules=(),
            load=(TASK,),
            log_levels={"": logging.WARNING},
        )
        self._device = DeviceProcess(setup, start)
        self._device.spawn()

    def wait_ready(self) -> None:
        """Waits for its model.

        Raises:
            SystemExit: It cannot load it.
        """
        for reply in self._replies():
            if isinstance(reply, NotReady):
                raise SystemExit(reply.text)
            assert isinstance(reply, Ready)
        device = psutil.Process(self._device.pid)
        self._processes = {"feeder": psutil.Process(), "device": device}

    def run(self, texts: Sequence[str], *, keep: bool = False) -> Sample:
        """Embeds all texts, in batches in the order of arrival."""
        size = self._target.batch_size
        starts = iter(range(0, len(texts), size))
        results = [b""] * len(texts)
        tokens = computed_tokens = 0
        forward_ms = 0.0
        used, began_s = cpu_by_name(self._processes), time.perf_counter()
        held: dict[int, int] = {}
        held.update(self._send(texts, start) for start in itertools.islice(starts, self.depth))
        while held:
            for done in self._replies():
                assert isinstance(done, Done)
                held.update(self._send(texts, start) for start in itertools.islice(starts, 1))
                for place, result in enumerate(_results(done), held.pop(done.id)):
                    results[place] = result
                tokens += done.tokens
                computed_tokens += done.computed_tokens
                forward_ms += done.forward_ms
        seconds = time.perf_counter() - began_s
        return Sample(
            seconds=seconds,
            cpu_s=cpu_since(used, self._processes),
            tokens=tokens,
            computed_tokens=computed_tokens,
            stages_s={"forward": forward_ms / 1e3},
            results=[json.loads(each) for each in results] if keep else [],
        )

    def _send(self, texts: Sequence[str], start: int) -> tuple[int, int]:
        part = texts[start : start + self._target.batch_size]
        work = Work(
            id=next(self._ids),
            task=TASK,
            keywords={},
            jobs=[(str(number), (text,), False) for number, text in enumerate(part)],
            max_batch_size=self._target.batch_size,
            max_batch_tokens=None,
        )
        assert self._device.link is not None
        if not self._device.link.send(pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)):
            self._flush()
        return work.id, start

    def _flush(self) -> None:
        link = self._device.link
        assert link is not None
        while not link.flush():
            select.select([], [link.writer], [])

    def _replies(self) -> list[Reply]:
        assert self._device.link is not None
        while True:
            select.select([self._device.link.reader], [], [])
            try:
                if replies := self._device.receive():
                    return replies
            except EOFError:
                raise SystemExit(f"the device {self._device.reap()}; see above") from None

    def stop(self) -> None:
        """Ends the process."""
        self._device.stop(kill_at_once=True)


class OnnxDevice(DirectDevice):
    """The same with ONNX Runtime in the place of torch, on a copy of the model."""

    name = "onnx: device, fed directly"

    def __init__(self, target: Target) -> None:
        """Exports the model, and starts the device."""
        self._copies = tempfile.TemporaryDirectory(prefix="batchery-bench-onnx-")
        copy = str(Path(self._copies.name, "model"))
        shutil.copytree(target.folder, copy)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.engine.onnx_file", copy],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        others = os.environ[MODELS]
        model = {**json.loads(others)[TASK], "model": copy, "engine": "onnx", "dtype": "auto"}
        os.environ[MODELS] = json.dumps({TASK: model})
        try:
            super().__init__(target)
        finally:
            os.environ[MODELS] = others

    def stop(self) -> None:
        """Ends the process, and removes the copy."""
        super().stop()
        self._copies.cleanup()


def _results(done: Done) -> Iterator[bytes]:
    for _, spelled in done.jobs:
        if spelled[0] != "encoded":
            raise SystemExit(f"the device answers {spelled}")
        yield spelled[1]
