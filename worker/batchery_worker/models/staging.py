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
