"""Which models are on which devices: pure.

A model is on all devices, unless its settings name devices, or say how many are enough. Those that
must have a number of them are placed last, the largest first, each on the devices that have least.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batchery.device_names import exact_name
from batchery.errors import SettingsError, counted

#: Why a model is on a device, as `batchery stats` says it.
EVERYWHERE, NAMED, CHOSEN = "all devices", "devices", "replicas"


class PlacedModel(NamedTuple):
    """What is known of a model before it is loaded."""

    name: str
    #: Estimated memory; None if nobody knows.
    held_bytes: int | None = None
    #: Names of devices; None for all of them.
    devices: Sequence[str] | None = None
    #: Number of devices that the worker chooses; None for all of them.
    replicas: int | None = None


@dataclass(slots=True)
class _Load:
    """What is on a device so far."""

    models: dict[str, str] = field(default_factory=dict)
    held_bytes: int = 0


def place_models(
    models: Sequence[PlacedModel], devices: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Chooses the devices of each model.

    Args:
        models: In the order in which they should be loaded.
        devices: Of the worker.

    Returns:
        By device, the names of its models, in that order, and why each is there.

    Raises:
        SettingsError: A model names a device that the worker has not, or more than there are.
    """
    there = {exact_name(name): name for name in devices}
    found = {name: _Load() for name in devices}
    largest_first = sorted(models, key=lambda each: -(each.held_bytes or 0))
    for each in models:
        if each.devices is not None:
            _put(each, NAMED, [found[name] for name in _find_named(each, there)])
        elif each.replicas is None:
            _put(each, EVERYWHERE, list(found.values()))
    for each in largest_first:
        if each.replicas is not None:
            _put(each, CHOSEN, _choose_emptiest(each, list(found.values())))
    order = {each.name: number for number, each in enumerate(models)}
    return {
        name: dict(sorted(load.models.items(), key=lambda item: order[item[0]]))
        for name, load in found.items()
    }


def _find_named(model: PlacedModel, there: Mapping[str, str]) -> list[str]:
    """The devices that a model names."""
    names = list(dict.fromkeys(map(exact_name, model.devices or ())))
    unknown = [name for name in names if name not in there]
    if unknown or not names:
        raise SettingsError(
            f"model {model.name!r}: devices = {list(model.devices or ())!r}, but this worker has"
            f" {', '.join(there.values())}; name some of these, or leave it out for all of them"
        )
    if model.replicas is not None:
        raise SettingsError(f"model {model.name!r}: has devices and replicas; give one of them")
    return [there[name] for name in names]


def _choose_emptiest(model: PlacedModel, found: Sequence[_Load]) -> Sequence[_Load]:
    """The devices with least memory taken, then with fewest models, then the first ones."""
    assert model.replicas is not None
    if not 1 <= model.replicas <= len(found):
        raise SettingsError(
            f"model {model.name!r}: replicas = {model.replicas}, but this worker has"
            f" {counted(len(found), 'device')}; give a number from 1 to {len(found)}"
        )
    emptiest = sorted(found, key=lambda load: (load.held_bytes, len(load.models)))
    return emptiest[: model.replicas]


def _put(model: PlacedModel, why: str, loads: Sequence[_Load]) -> None:
    for load in loads:
        load.models[model.name] = why
        load.held_bytes += model.held_bytes or 0
