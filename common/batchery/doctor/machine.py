"""Facts of this machine: devices, memory, limits, folders of models, an open Flower."""

import ctypes
import os
import platform
import re
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchery.doctor.facts import FactUnknown, ModelFolder, ask_each
from batchery.settings import HUB_ID, ModelSettings

#: How long Flower may take for its page, in seconds.
FLOWER_TIMEOUT_S = 2.0

#: Its port, if nobody says otherwise.
FLOWER_PORT = 5555

#: What a driver of CUDA answers on a machine that has no device.
CUDA_NO_DEVICE = 100

#: What Docker, Podman and Kubernetes put into a container.
CONTAINER_MARKS = (
    *("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io/serviceaccount"),
)

#: An address of nobody, by which this machine's own is found; nothing is sent there.
NOBODY = ("198.51.100.1", 9)


def gather_machine(flower_url: str | None) -> dict[str, Any]:
    """Gathers all of them but for the models; takes no longer than Flower does.

    Args:
        flower_url: URL of a Flower; None for port 5555 of this machine's own address.
    """
    sources = {
        "host": platform.node,
        "version": lambda: version("batchery"),
        "torch_cuda": _read_torch_cuda,
        "memory_share": _read_memory_share,
        "open_files": _read_open_files,
        "shm_bytes": lambda: shutil.disk_usage("/dev/shm").total,
        "in_container": lambda: any(map(os.path.exists, CONTAINER_MARKS)),
        "open_flower": lambda: _find_open_flower(flower_url),
    }
    devices, driver = _read_driver()
    return {**ask_each(sources), "cuda_devices": devices, "driver_cuda": driver}


def gather_models(models: Mapping[str, ModelSettings]) -> dict[str, ModelFolder | None]:
    """What is in the folder of each model; None for a model of the hub.

    Models that a server computes are left out.
    """
    return {
        name: _read_folder(each.model) for name, each in models.items() if each.engine != "openai"
    }


def _read_folder(model: str) -> ModelFolder | None:
    path = Path(model).expanduser()
    if path.is_file():
        return ModelFolder(True, {path.suffix})
    if path.is_dir():
        return ModelFolder(True, {each.suffix for each in path.iterdir() if each.is_file()})
    return None if HUB_ID.fullmatch(model) else ModelFolder(False, ())


def _read_driver() -> tuple[int | FactUnknown, float | FactUnknown]:
    """Number of CUDA devices, and the version that the driver is for; without torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, FactUnknown("this machine has no driver of CUDA")
    devices, number = ctypes.c_int(), ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(devices)):
        unknown = FactUnknown(f"the driver of CUDA does not start: error {code}")
        return 0 if code == CUDA_NO_DEVICE else unknown, unknown
    driver.cuDriverGetVersion(ctypes.byref(number))
    return devices.value, number.value // 1000 + number.value % 1000 / 100


def _read_torch_cuda() -> float | None:
    """The version of CUDA that torch is built for, by its files: it would take long to load."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise FactUnknown("torch is not installed here")
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return float(found[1]) if found else None


def _read_memory_share() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return 1 - kib["MemAvailable"] / kib["MemTotal"]


def _read_open_files() -> int:
    import resource  # Windows has none, where clients run, too.

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _find_open_flower(named_url: str | None) -> str:
    """The URL of a Flower that shows its workers to anybody; empty if there is none.

    Raises:
        FactUnknown: The one that is named does not answer.
    """
    # Without a proxy: one from the environment cannot reach this machine's own addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        url = named_url or f"http://{_find_own_address()}:{FLOWER_PORT}"
        with opener.open(f"{url.rstrip('/')}/workers", timeout=FLOWER_TIMEOUT_S) as page:
            # One with a login redirects to it.
            is_open = page.url.endswith("/workers") and b"Flower</title>" in page.read()
    except urllib.error.HTTPError:
        return ""  # It answers, and does not show them.
    except (OSError, ValueError) as error:
        if named_url is None:
            return ""
        raise FactUnknown(f"--flower {named_url}: {error}") from error
    return url if is_open else ""


def _find_own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(NOBODY)
        return str(probe.getsockname()[0])
