"""Names of devices: as torch spells them, and several of them as one."""

import re

DEVICE_NAME = re.compile(r"cpu(:\d+)?|mps|cuda(:\d+)?")

#: Several that are one device, as a model lies on all of them. What does not fit into cards is in
#: main memory (`cpu`), and what does not fit there stays in the model's files (`disk`).
JOINT_DEVICE = re.compile(r"cuda:\d+(\+cuda:\d+)*(\+cpu)?(\+disk)?|cpu:\d+(\+cpu:\d+)+|cpu\+disk")


def is_device(name: str) -> bool:
    """Whether a name is that of a device, or of several that are one."""
    return bool(DEVICE_NAME.fullmatch(name) or JOINT_DEVICE.fullmatch(name))


def main_device(name: str) -> str:
    """The device that inputs go to, and results come from: of several that are one, the first."""
    return name.partition("+")[0]


def check_devices(value: object) -> object:
    """Returns the names in the setting `devices`, which may be text with commas.

    Raises:
        ValueError: One of them is no device, or is named twice.
    """
    if value == "auto" or (isinstance(value, str) and value.startswith("[")):
        return value
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        raise ValueError("use 'auto', or a list such as ['cuda:0', 'cuda:1']")
    for name in names:
        if not (isinstance(name, str) and is_device(name)):
            raise ValueError(
                f"{name!r} is not a device; use 'auto', 'cpu', 'cuda:0' or 'mps', or several"
                " as one, such as 'cuda:0+cuda:1', 'cuda:0+cpu' or 'cpu+disk'"
            )
    # What others may share is left out. `cuda` is `cuda:0`, and `cpu` is `cpu:0`.
    own = [name.removesuffix("+disk").removesuffix("+cpu") for name in names]
    parts = [part for name in own for part in name.split("+")]
    if len({f"{part}:0" if part in ("cuda", "cpu") else part for part in parts}) < len(parts):
        raise ValueError("a device is named twice")
    return names
