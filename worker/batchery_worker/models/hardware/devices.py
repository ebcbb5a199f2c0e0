"""Which devices there are, and which number format suits one."""

import torch

from batchery.errors import DeviceUnavailable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_named(name: str) -> torch.device:
    """The device of a name; `cuda` is `cuda:0`, and all processes on the CPU share that.

    Raises:
        DeviceUnavailable: This machine has no such device; names the devices that it has.
    """
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
    """Makes a device torch's default.

    Raises:
        DeviceUnavailable: See `device_named`.
    """
    device = device_named(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)


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
