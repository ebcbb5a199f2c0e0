"""The memory of a device: its figures, and how to free it."""

import os
import platform
from typing import Any


class Memory:
    """The memory of a CPU, which nobody counts per tensor; base class for other devices."""

    def description(self) -> str:
        """The kind of the device; equal devices have the same description."""
        return f"{platform.machine()}, {os.cpu_count()} cores"

    def figures(self) -> dict[str, Any]:
        """Its figures in `batchery stats`."""
        return {}

    def allocated_bytes(self) -> int:
        """Memory that tensors hold now, in bytes."""
        return 0

    def free_bytes(self) -> int | None:
        """Memory that is free for further tensors, in bytes; None if nobody knows."""
        return None

    def forget_peak(self) -> None:
        """Resets `peak_bytes`, which counts from now on."""

    def peak_bytes(self) -> int:
        """Maximum memory that tensors held at a time, in bytes."""
        return 0

    def release(self) -> None:
        """Gives memory back that no tensor holds; slow, so only after memory ran out."""

    def wait(self) -> None:
        """Waits until the device has computed everything that was launched on it."""
