"""The memory of a CUDA device, as torch counts it."""

from typing import Any

import torch

from batchery.errors import DeviceDied
from batchery_worker.memory import Memory


class CudaMemory(Memory):
    """What this process holds of a CUDA device."""

    def __init__(self, device: str, fraction: float = 1.0) -> None:
        self._device = torch.device(device)
        if fraction < 1:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def figures(self) -> dict[str, Any]:
        """In bytes: `allocated` to tensors, now and at its peak; `reserved` from the device."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return {
            "allocated_bytes": self.allocated_bytes(),
            "reserved_bytes": torch.cuda.memory_reserved(self._device),
            "peak_bytes": self.peak_bytes(),
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
        }

    def allocated_bytes(self) -> int:
        """What tensors of this process hold now."""
        return self._allocated_bytes("current")

    def forget_peak(self) -> None:
        """Starts `peak_bytes` anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Maximum that tensors of this process held at a time."""
        return self._allocated_bytes("peak")

    def _allocated_bytes(self, which: str) -> int:
        # Once per batch. torch's function for the single number sorts all statistics first.
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(statistics["allocated_bytes"]["all"][which]) if statistics else 0

    def release(self) -> None:
        """Gives back what no tensor holds.

        To be called only after a pass ran out of memory. torch has released by then what was free
        during the pass, but not what the pass itself held, which was cut for a shape that will not
        come again. At any other time the next pass would have to ask for the same memory again.
        """
        torch.cuda.empty_cache()

    def wait(self) -> None:
        """Waits until the device has computed everything that was launched.

        Raises:
            DeviceDied: An error has ended the context of this process, which cannot open another.
        """
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceDied(f"the CUDA context of {self._device} has ended: {error}") from error
