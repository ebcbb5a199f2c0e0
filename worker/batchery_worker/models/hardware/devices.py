"""Which devices there are, which number format suits one, and the memory of a CUDA device."""

from collections.abc import Iterable
from typing import Any

import torch

from batchery.device_names import is_joint
from batchery.errors import DeviceDied, DeviceUnavailable
from batchery_worker.memory import Memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_named(name: str) -> torch.device:
    """The device of a name; `cuda` is `cuda:0`, and all processes on the CPU share that.

    Raises:
        DeviceUnavailable: This machine has no such device; names the devices that it has.
    """
    if is_joint(name):
        raise DeviceUnavailable(
            f"device {name!r}: models that transformers computes can lie on several devices; name"
            " one, or another kind or engine"
        )
    there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        there.append("mps")
    exact = "cuda:0" if name == "cuda" else name
    if name.partition(":")[0] == "cpu":
        exact = "cpu"
    if exact not in there:
        raise DeviceUnavailable(
            f"device {name!r}: not on this machine, or not for torch {torch.__version__};"
            f" there is {', '.join(there)}"
        )
    return torch.device(exact)


def use_device(name: str) -> None:
    """Makes a device torch's default; of several that are one, the first."""
    device, *_ = [device_named(part) for part in name.split("+") if part != "disk"]
    if device.type == "cuda":
        torch.cuda.set_device(device)


def open_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """A new stream, beside what a CUDA device does on others; None on other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def settle_cuda() -> None:
    """Keeps cuDNN from attention, for the whole process; to be called before the first pass.

    On recent devices torch prefers cuDNN's attention, which plans each new shape on the host for
    tens of milliseconds and keeps the plans for ever. Texts make new shapes all the time.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_for(setting: str, device: torch.device) -> torch.dtype:
    """The number format of weights and activations.

    Args:
        setting: `fp32`, `bf16`, `fp16`; or `auto`, which is bf16 if the hardware supports it (CUDA
            from compute capability 8.0 on), else fp32.
        device: Where the model runs.
    """
    if setting != "auto":
        return DTYPES[setting]
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        # Emulated bf16 would be slower than fp32.
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def sum_cpu_bytes(parts: Iterable[Any]) -> int:
    """Main memory of the weights and buffers of those parts that are modules."""
    tensors = {
        id(tensor): tensor.nbytes
        for part in parts
        if isinstance(part, torch.nn.Module)
        for tensor in (*part.parameters(), *part.buffers())
        if tensor.device.type == "cpu"
    }
    return sum(tensors.values())


#: Share of the memory for models; the rest is for passes.
MODEL_SHARE = 0.9


class CudaMemory(Memory):
    """What this process holds of a CUDA device."""

    def __init__(self, device: str, fraction: float = 1.0) -> None:
        self._device = torch.device(device)
        self._fraction = fraction
        if fraction < 1:
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def model_bytes(self) -> int:
        """Nine tenths of what this process may use."""
        _, total_bytes = torch.cuda.mem_get_info(self._device)
        return int(MODEL_SHARE * self._fraction * total_bytes)

    def figures(self) -> dict[str, Any]:
        """Bytes `allocated` to tensors, now and at the peak, and `reserved`."""
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
