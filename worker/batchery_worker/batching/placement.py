"""Which models are on which devices: pure."""

from collections.abc import Mapping, Sequence

from batchery.device_names import exact_name
from batchery.errors import SettingsError

#: Why a model is on a device, as `batchery stats` says it.
EVERYWHERE, NAMED = "all devices", "devices"


def place_models(
    models: Mapping[str, Sequence[str] | None], devices: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Chooses the devices of each model: all of them, unless its settings name some.

    Args:
        models: In the order in which they should be loaded, the devices that each names, if any.
        devices: Of the worker.

    Returns:
        By device, the names of its models, in that order, and why each is there.

    Raises:
        SettingsError: A model names a device that the worker has not.
    """
    there = {exact_name(name): name for name in devices}
    placed: dict[str, dict[str, str]] = {name: {} for name in devices}
    for model, named in models.items():
        wanted = list(there if named is None else map(exact_name, named))
        if not wanted or not there.keys() >= {*wanted}:
            raise SettingsError(
                f"model {model!r}: devices = {list(named or ())!r}, but this worker has"
                f" {', '.join(devices)}; name some of these, or leave it out for all of them"
            )
        for name in wanted:
            placed[there[name]][model] = EVERYWHERE if named is None else NAMED
    return placed
