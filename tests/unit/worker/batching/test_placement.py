"""Which models are on which devices."""

import pytest

from batchery.errors import SettingsError
from batchery_worker.batching.placement import place_models


def names(placed: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    return {device: list(models) for device, models in placed.items()}


def test_all_models_are_on_all_devices() -> None:
    placed = place_models({"a": None, "b": None}, ["cuda:0", "cuda:1"])
    both = {"a": "all devices", "b": "all devices"}
    assert placed == {"cuda:0": both, "cuda:1": both}


def test_models_are_on_the_devices_that_they_name() -> None:
    placed = place_models({"a": ["cuda"], "b": ["cuda:1", "cuda:0"]}, ["cuda:0", "cuda:1"])
    assert names(placed) == {"cuda:0": ["a", "b"], "cuda:1": ["b"]}
    assert place_models({"a": ["cpu:0"]}, ["cpu"]) == {"cpu": {"a": "devices"}}


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (
            ["cuda:7"],
            "model 'a': devices = ['cuda:7'], but this worker has cpu:0, cpu:1; name some",
        ),
        ([], "model 'a': devices = [], but this worker has"),
    ],
)
def test_what_cannot_be_placed_is_said_in_one_line(devices: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        place_models({"a": devices}, ["cpu:0", "cpu:1"])
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
