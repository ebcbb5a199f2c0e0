"""Names of devices: as torch spells them, and several of them as one."""

import re

DEVICE_NAME = re.compile(r"cpu(:\d+)?|mps|cuda(:\d+)?")

#: Several that are one device, as a model lies on all of them. What does not fit into cards is in
#: main memory (`cpu`), and what does not fit there stays in the model's files (`disk`).
JOINT_DEVICE = re.compile(r"cuda:\d+(\+cuda:\d+)*(\+cpu)?(\+disk)?|cpu:\d+(\+cpu:\d+)+|cpu\+disk")


def is_device(name: str) -> bool:
    """Whether a name is that of a device, or of several that are one."""
    return bool(DEVICE_NAME.fullmatch(name) or JOINT_DEVICE.fullmatch(name))


def is_joint(name: str) -> bool:
    """Whether a name is that of several devices that are one."""
    return "+" in name


def main_device(name: str) -> str:
    """The device that inputs go to, and results come from: of several that are one, the first."""
    return name.partition("+")[0]


def device_type(name: str) -> str:
    """What torch calls the type of a device, or of the first of several: `cpu`, `cuda` or `mps`."""
    return main_device(name).partition(":")[0]


def exact_name(name: str) -> str:
    """The same name for `cuda` and `cuda:0`, and for `cpu` and `cpu:0`."""
    return f"{name}:0" if name in ("cuda", "cpu") else name


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
    # What others may share is left out.
    own = [name.removesuffix("+disk").removesuffix("+cpu") for name in names]
    parts = [part for name in own for part in name.split("+")]
    if len(set(map(exact_name, parts))) < len(parts):
        raise ValueError("a device is named twice")
    return names
