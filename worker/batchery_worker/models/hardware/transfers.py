"""Transfers between host and device, one each way per forward pass, that nobody waits for."""

import os
import time
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from batchery_worker.models.hardware.devices import open_stream

#: Pause between two looks at an event, in seconds.
POLL_S = 10e-6

#: Number of cores up to which a thread that waits for results leaves its core to those that
#: prepare batches and store results. With more it spins, which sees the results sooner.
FEW_CORES = 4


class HostToDevice:
    """Copies inputs to one device, while it computes what was queued before.

    Only copies from pinned memory run while the host goes on. torch keeps such memory for reuse,
    with an event for each piece: a piece is not reused before the last copy from it is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A stream of its own: behind the last pass, the copy would come too late.
        self._stream = open_stream(device)

    def send(self, numbers: NDArray[Any]) -> Tensor:
        """Copies numbers to the device, without waiting for the end of the copy.

        Args:
            numbers: Inputs of a forward pass, on the host and of any shape; in one piece, where
                that is possible.

        Returns:
            The same on the device, ready for what is queued on its current stream from now on.
        """
        there = torch.from_numpy(numbers)
        if self._stream is None:
            return there.to(self._device)
        pinned = there.pin_memory()
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            sent = pinned.to(self._device, non_blocking=True)
        compute.wait_stream(self._stream)
        # The memory belongs to the copy stream, which must not reuse it before it is read.
        sent.record_stream(compute)
        return sent


class PendingCopy:
    """Results on their way to the host."""

    def __init__(self, values: Tensor, copied: torch.cuda.Event | None = None) -> None:
        """Waits for nothing yet.

        Args:
            values: Where the results will be.
            copied: The end of the copy; None where there is nothing to wait for.
        """
        self._values = values
        self._copied = copied

    def arrives_within(self, limit_s: float) -> bool:
        """Whether the results arrive so soon, in seconds; returns as soon as that is known."""
        if self._copied is None:
            return True
        end_s = time.perf_counter() + limit_s
        while not self._copied.query():  # type: ignore[no-untyped-call]
            if time.perf_counter() >= end_s:
                return False
            # Other threads need the interpreter.
            time.sleep(POLL_S)
        return True

    def wait(self) -> Tensor:
        """Waits for the results, on the CPU; may be called again."""
        if self._copied is not None:
            # Here alone the host waits for a pass, and for no later one.
            self._copied.synchronize()
        return self._values.cpu()


class DeviceToHost:
    """Copies results of one device to the host, while it computes what was queued afterwards."""

    def __init__(self, device: torch.device, waiters: int = 1) -> None:
        """Opens a stream for the copies.

        Args:
            device: Where results come from.
            waiters: Number of threads that wait for results at a time.
        """
        # Not the stream of the inputs: there the next inputs would wait for these results.
        self._stream = open_stream(device)
        cores = len(os.sched_getaffinity(0))
        self._sleeps = self._stream is not None and cores <= FEW_CORES * waiters

    def start(self, values: Tensor) -> PendingCopy:
        """Starts to copy what is queued on the device's current stream, without waiting."""
        if self._stream is None:
            return PendingCopy(values)
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        # torch reuses pinned memory once nobody holds or fills it.
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            there.copy_(values, non_blocking=True)
            copied = torch.cuda.Event(blocking=self._sleeps)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        # The memory belongs to the stream that computed it, which must not reuse it before the
        # copy.
        values.record_stream(self._stream)
        return PendingCopy(there, copied)
