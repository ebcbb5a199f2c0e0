"""The way of model inputs to the device: one copy per forward pass, from pinned memory."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def stream_of_its_own(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for copies beside what a CUDA device computes; None where there are no streams."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Staging:
    """Copies inputs to one device, while it computes what was queued before.

    Only from pinned memory does a copy run beside the host. torch keeps that memory and gives it
    out again, with an event for each piece: not before the last copy from it is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of its own: a copy that waited its turn behind the last pass would come too late.
        self._stream = stream_of_its_own(device)

    def send(self, numbers: NDArray[np.int64]) -> Tensor:
        """Copies numbers to the device, without waiting for the end of the copy.

        Args:
            numbers: All inputs of a forward pass in one piece, of any shape.

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
        # It belongs to the stream of copies, which must not have it back before it is read.
        sent.record_stream(compute)
        return sent


class Arrival:
    """Results on their way."""

    def __init__(self, values: Tensor, over: torch.cuda.Event | None = None) -> None:
        """Takes note of them.

        Args:
            values: Where they will be.
            over: The end of the copy; None where there is nothing to wait for.
        """
        self._values = values
        self._over = over

    def wait(self) -> Tensor:
        """The results on the CPU, as soon as they are there; may be called again."""
        if self._over is not None:
            # The one point at which the host waits for a pass, and for nothing behind it.
            self._over.synchronize()
        return self._values.cpu()


class Landing:
    """Copies results of one device to the host, while it computes what was queued behind them."""

    def __init__(self, device: torch.device) -> None:
        # Not that of the inputs: the next ones would wait there until these are computed.
        self._stream = stream_of_its_own(device)

    def begin(self, values: Tensor) -> Arrival:
        """Begins to copy what is queued on the device's current stream, without waiting."""
        if self._stream is None:
            return Arrival(values)
        self._stream.wait_stream(torch.cuda.current_stream(values.device))
        # torch keeps pinned memory and gives it out again once nobody holds or fills it.
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            there.copy_(values, non_blocking=True)
            over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            over.record(self._stream)
        # It belongs to the stream that computed it, which must not have it back before the copy.
        values.record_stream(self._stream)
        return Arrival(there, over)
