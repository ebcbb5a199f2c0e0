"""As much of torch as a device process asks of it, on a machine with two GPUs that it has not.

A context belongs to a process. After `break_context` all that it is asked for raises, as after a
device-side assert.
"""

from types import SimpleNamespace
from typing import Any

__version__ = "of the tests"

dtype = str
float32, bfloat16, float16 = "float32", "bfloat16", "float16"

backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False))


class device:
    """As torch's own."""

    def __init__(self, name: str) -> None:
        self.type, _, index = name.partition(":")
        self.index = int(index or 0)


class _Cuda:
    def __init__(self) -> None:
        self.current, self.is_broken = 0, False
        #: Devices on which this process has opened a context, in order.
        self.contexts: list[int] = []
        self.fractions: dict[int, float] = {}

    def _open(self) -> None:
        if self.is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered\nat line 3")
        if self.current not in self.contexts:
            self.contexts.append(self.current)

    def device_count(self) -> int:
        return 2

    def get_device_name(self, _: Any) -> str:
        return "No GPU that anybody knows"

    def current_device(self) -> int:
        self._open()
        return self.current

    def set_device(self, chosen: Any) -> None:
        self.current = chosen.index

    def synchronize(self, _: Any = None) -> None:
        self._open()

    def set_per_process_memory_fraction(self, fraction: float, chosen: Any) -> None:
        self.fractions[chosen.index] = fraction

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        self._open()
        return 1, 2

    def memory_reserved(self, _: Any) -> int:
        return 0

    def memory_stats_as_nested_dict(self, _: Any) -> dict[str, Any]:
        return {}

    def break_context(self) -> None:
        self.is_broken = True


cuda = _Cuda()
