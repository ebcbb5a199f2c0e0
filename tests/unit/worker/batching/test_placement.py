"""Which models are on which devices."""

import pytest

from batchery.errors import SettingsError
from batchery_worker.batching.placement import PlacedModel, place_models


def names(placed: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    return {device: list(models) for device, models in placed.items()}


def test_all_models_are_on_all_devices() -> None:
    placed = place_models([PlacedModel("a"), PlacedModel("b", 5)], ["cuda:0", "cuda:1"])
    both = {"a": "all devices", "b": "all devices"}
    assert placed == {"cuda:0": both, "cuda:1": both}


def test_models_are_on_the_devices_that_they_name() -> None:
    models = [PlacedModel("a", devices=["cuda"]), PlacedModel("b", devices=["cuda:1", "cuda:0"])]
    placed = place_models(models, ["cuda:0", "cuda:1"])
    assert names(placed) == {"cuda:0": ["a", "b"], "cuda:1": ["b"]}
    assert place_models([PlacedModel("a", devices=["cpu:0"])], ["cpu"]) == {"cpu": {"a": "devices"}}


def test_replicas_go_to_the_emptiest_devices_the_largest_first() -> None:
    models = [
        *(PlacedModel("small", 1, replicas=1), PlacedModel("large", 9, replicas=1)),
        *(PlacedModel("middle", 5, replicas=2), PlacedModel("fixed", 4, devices=["cpu:0"])),
    ]
    placed = place_models(models, ["cpu:0", "cpu:1", "cpu:2"])
    assert names(placed) == {
        "cpu:0": ["middle", "fixed"],
        "cpu:1": ["large"],
        "cpu:2": ["small", "middle"],
    }


def test_replicas_of_unknown_size_are_spread_by_their_number() -> None:
    models = [PlacedModel(name, replicas=1) for name in "abcd"]
    assert names(place_models(models, ["cpu:0", "cpu:1"])) == {
        "cpu:0": ["a", "c"],
        "cpu:1": ["b", "d"],
    }


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            PlacedModel("a", devices=["cuda:7"]),
            "model 'a': devices = ['cuda:7'], but this worker has cpu:0, cpu:1; name some",
        ),
        (PlacedModel("a", devices=[]), "model 'a': devices = [], but this worker has"),
        (PlacedModel("a", devices=["cpu:0"], replicas=1), "model 'a': has devices and replicas"),
        (
            PlacedModel("a", replicas=3),
            "model 'a': replicas = 3, but this worker has 2 devices; give a number from 1 to 2",
        ),
    ],
)
def test_what_cannot_be_placed_is_said_in_one_line(model: PlacedModel, text: str) -> None:
    with pytest.raises(SettingsError) as raised:
        place_models([model], ["cpu:0", "cpu:1"])
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
