"""The memory of a device, and of a process."""

import os
from pathlib import Path
from typing import Any

KIB = 1024


class Memory:
    """The memory of a device that is not counted, such as a CPU: its memory is the process's."""

    def model_bytes(self) -> int | None:
        """Maximum memory of all models together, where no setting says it; None for no limit."""
        return None

    def figures(self) -> dict[str, Any]:
        """Its figures in `batchery stats`."""
        return {}

    def allocated_bytes(self) -> int:
        """Memory that tensors hold now, in bytes."""
        return 0

    def forget_peak(self) -> None:
        """Starts `peak_bytes` anew."""

    def peak_bytes(self) -> int:
        """Maximum that tensors held at a time."""
        return 0

    def release(self) -> None:
        """Gives back what no tensor holds. It is slow, so only after memory ran out."""

    def wait(self) -> None:
        """Waits until the device has computed everything that was launched.

        Raises:
            DeviceDied: The device can compute nothing any more, for this process.
        """


def resident_kib(pid: int) -> int | None:
    """Main memory that a process holds now, in KiB; None if the system is not Linux.

    On Linux a file has it, which takes microseconds to read. Other systems need a process for it.
    """
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") // KIB
    except (OSError, ValueError, IndexError):
        return None
