"""Calibrations on disk: found again, or measured again, and never in the way."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from batchery import Model, ModelSettings
from batchery_worker.batching.calibration import CalibrationCache, cache_key
from batchery_worker.batching.cost_model import Calibration

FOUND = Calibration(0.1, 0.2, 3.0, 4.0, 5000)
ABOUT = {"device": "a GPU", "weights_bytes": 7}


class Named(Model):
    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings


def named(**changes: str) -> Named:
    given = {"kind": "embedding", "model": "some/model", **changes}
    return Named(ModelSettings.model_validate(given))


def test_what_was_kept_is_found(tmp_path: Path) -> None:
    folder = str(tmp_path / "not" / "there" / "yet")
    assert CalibrationCache(folder).get("key.json") is None
    CalibrationCache(folder).put("key.json", FOUND)
    assert CalibrationCache(folder).get("key.json") == FOUND
    assert CalibrationCache(folder).get("other.json") is None
    assert [path.name for path in Path(folder).iterdir()] == ["key.json"]


WRONG = [
    b"",
    b"{",
    b"[1]",
    b'{"token_ms": 1}',
    b"\xff\xfe",
    json.dumps({**asdict(FOUND), "token_ms": 0}).encode(),
    json.dumps({**asdict(FOUND), "token_ms": "much"}).encode(),
]


@pytest.mark.parametrize("content", WRONG, ids=repr)
def test_what_cannot_be_read_is_measured_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key.json").write_bytes(content)
    cache = CalibrationCache(str(tmp_path))
    assert cache.get("key.json") is None
    cache.put("key.json", FOUND)
    assert cache.get("key.json") == FOUND


def test_where_nothing_can_be_kept_nothing_is(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    for folder in (None, str(blocked), str(blocked / "folder"), "/dev/null/folder"):
        cache = CalibrationCache(folder)
        cache.put("key.json", FOUND)
        assert cache.get("key.json") is None


def test_a_key_is_another_one_as_soon_as_costs_may_be_others() -> None:
    key = cache_key("embed", named(), ABOUT)
    assert key == cache_key("embed", named(), ABOUT)
    packed = named()
    packed.pads = False
    others = {
        cache_key("other", named(), ABOUT),
        cache_key("embed", named(model="another/model"), ABOUT),
        cache_key("embed", named(dtype="bf16"), ABOUT),
        cache_key("embed", packed, ABOUT),
        cache_key("embed", named(), {**ABOUT, "device": "another GPU"}),
        cache_key("embed", named(), {**ABOUT, "weights_bytes": 8}),
        cache_key("embed", Model(), ABOUT),
    }
    assert len(others | {key}) == 8
    assert "/" not in key
