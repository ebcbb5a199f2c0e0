"""The memory of a device: what there is to know of it, and to do about it."""

import os
import platform
from typing import Any


class Memory:
    """Of a device whose memory nobody counts for us: a CPU's is that of the process."""

    def description(self) -> str:
        """What kind of device it is of: equal ones say the same."""
        return f"{platform.machine()}, {os.cpu_count()} cores"

    def figures(self) -> dict[str, Any]:
        """Its figures in `batchery stats`."""
        return {}

    def allocated_bytes(self) -> int:
        """Memory that tensors hold now, in bytes."""
        return 0

    def free_bytes(self) -> int | None:
        """What further tensors could hold; None if nobody knows."""
        return None

    def forget_peak(self) -> None:
        """From now on `peak_bytes` is of what comes."""

    def peak_bytes(self) -> int:
        """Most that tensors held at a time."""
        return 0

    def release(self) -> None:
        """Gives back what no tensor holds; only after memory ran out, as it is slow."""

    def wait(self) -> None:
        """Returns when everything that was launched on the device is computed."""
