"""The way of model inputs to the device: one copy per forward pass, from pinned memory."""

from collections.abc import Mapping

import torch
from torch import Tensor

#: Buffers that take turns, so that the next inputs can be written while the last are on their way.
SLOTS = 2

#: Size of the first buffers, in numbers of 8 bytes; they grow with the largest forward pass.
FIRST_NUMBERS = 1 << 16


class Staging:
    """Copies inputs to one device.

    Only from pinned memory does a copy run beside the host, and pinning costs more than the copy.
    So the buffers are kept, and a forward pass with three inputs makes one copy, not three.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots = [_Slot() for _ in range(SLOTS)] if device.type == "cuda" else []
        self._turn = 0

    def send(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies inputs to the device, without waiting for the end of the copy.

        Args:
            inputs: By name, int64 on the CPU, of any shapes.

        Returns:
            The same on the device, ready for what is queued on its current stream from now on.
        """
        if not self._slots:
            return {name: tensor.to(self._device) for name, tensor in inputs.items()}
        self._turn = (self._turn + 1) % SLOTS
        slot = self._slots[self._turn]
        written = slot.write(inputs)
        sent = written.to(self._device, non_blocking=True)
        slot.leave()
        sizes = [tensor.numel() for tensor in inputs.values()]
        parts = zip(inputs.items(), torch.split(sent, sizes), strict=True)
        return {name: part.view(tensor.shape) for (name, tensor), part in parts}


class _Slot:
    """One pinned buffer, and when the device has read it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Puts the inputs behind each other; waits until the last copy from here is over."""
        self._read.synchronize()
        total = sum(tensor.numel() for tensor in inputs.values())
        if total > len(self._buffer):
            size = max(FIRST_NUMBERS, 1 << (total - 1).bit_length())
            self._buffer = torch.empty(size, dtype=torch.int64, pin_memory=True)
        written = self._buffer[:total]
        torch.cat([tensor.flatten() for tensor in inputs.values()], out=written)
        return written

    def leave(self) -> None:
        """Marks the end of the copy that was queued last."""
        self._read.record()
