"""The memory of a device: what there is to know of it, and to do about it."""

from typing import Any


class Memory:
    """Of a device whose memory nobody counts for us: a CPU's is that of the process."""

    def figures(self) -> dict[str, Any]:
        """What `batchery stats` shows of it."""
        return {}

    def allocated_bytes(self) -> int:
        """What tensors hold now."""
        return 0

    def forget_peak(self) -> None:
        """From now on `peak_bytes` is of what comes."""

    def peak_bytes(self) -> int:
        """Most that tensors held at a time."""
        return 0

    def release(self) -> None:
        """Gives back what no tensor holds; only after memory ran out, as it is slow."""

    def wait(self) -> None:
        """Returns when everything that was launched on the device is computed."""
