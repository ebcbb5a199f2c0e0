"""The way of results back to the host: begun with the pass, awaited when they are needed."""

import torch
from torch import Tensor

from batchery_worker.models.staging import stream_of_its_own


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
