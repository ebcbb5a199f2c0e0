"""Checks of this machine, of the models that the settings name, and of what is open to others."""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from batchery.doctor import thresholds as limits
from batchery.doctor.facts import Facts
from batchery.doctor.findings import Find, Symptom, when
from batchery.gateway_settings import is_loopback

#: Suffixes of weights that are loaded; a GGUF file is loaded for text generation.
SAFE_SUFFIXES = {".safetensors", ".gguf"}


def _find_old_driver(facts: Facts) -> list[Symptom]:
    if not facts.cuda_devices or facts.torch_cuda is None:
        return []
    driver, torch = facts.driver_cuda, facts.torch_cuda
    # Drivers serve all versions of CUDA with the same first number.
    text = f"the driver is for CUDA {driver}, and torch for {torch}"
    return when(int(driver) < int(torch), text, wheel=f"{driver:.1f}".replace(".", ""))


def _find_small_shm(facts: Facts) -> list[Symptom]:
    is_small = facts.cuda_devices and facts.shm_bytes < limits.MIN_SHM_BYTES
    return when(is_small, f"/dev/shm has {facts.shm_bytes >> 20:,} MiB")


def _find_missing_models(facts: Facts) -> Iterator[Symptom]:
    for name, folder in facts.folders.items():
        is_missing = folder is not None and not folder.exists
        path = facts.settings.models[name].model
        yield from when(is_missing, f"model {name}: there is no {path}", model=name)


def _find_pickles(facts: Facts) -> Iterator[Symptom]:
    for name, folder in facts.folders.items():
        if facts.settings.models[name].engine == "onnx":
            continue
        if folder is not None and folder.exists and not SAFE_SUFFIXES.intersection(folder.suffixes):
            path = facts.settings.models[name].model
            there = ", ".join(sorted(folder.suffixes)) or "no files"
            yield Symptom(f"model {name}: {path} has {there}", folder=path)


def _find_unpinned(facts: Facts) -> Iterator[Symptom]:
    for name, folder in facts.folders.items():
        model = facts.settings.models[name]
        code = ", and its code is run" if model.trust_remote_code else ""
        text = f"model {name}: {model.model} has no revision{code}"
        yield from when(folder is None and model.revision is None, text, model=name)


def _find_open_gateway(facts: Facts) -> list[Symptom]:
    gateway = facts.settings.gateway
    is_open = not gateway.keys and not is_loopback(gateway.host)
    return when(is_open, f"gateway.host is {gateway.host}, and there are no keys")


def _find_open_metrics(facts: Facts) -> list[Symptom]:
    metrics = facts.settings.metrics
    try:
        address = ip_address(metrics.host.strip("[]"))
    except ValueError:
        return []
    # In a container, all addresses are those of a network that its host has made for it.
    is_open = address.is_global or (address.is_unspecified and not facts.in_container)
    return when(metrics.port is not None and is_open, f"metrics.host is {metrics.host}")


CHECKS: Mapping[str, Find] = {
    "driver-old": _find_old_driver,
    "main-memory": lambda facts: when(
        facts.memory_share > limits.MAX_MAIN_MEMORY, f"{facts.memory_share:.0%} are in use"
    ),
    "open-files": lambda facts: when(
        facts.open_files < limits.MIN_OPEN_FILES, f"a process may open {facts.open_files:,} files"
    ),
    "shared-memory": _find_small_shm,
    "model-missing": _find_missing_models,
    "model-weights": _find_pickles,
    "model-unpinned": _find_unpinned,
    "gateway-keys": _find_open_gateway,
    "metrics-open": _find_open_metrics,
    "flower-open": lambda facts: when(
        facts.open_flower, f"{facts.open_flower} asks for no password"
    ),
}
