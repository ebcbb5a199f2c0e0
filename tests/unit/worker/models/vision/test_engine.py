"""Pictures in an engine: read on its thread, from where the settings allow."""

import json
from pathlib import Path

import pytest

from batchery import Engine, InvalidItem, ModelSettings
from support.pictures import draw, encode
from support.tiny_models import Build


def test_an_engine_takes_pictures(
    build_vision: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    picture = encode(draw(64, 48))
    (tmp_path / "a.png").write_bytes(picture)
    monkeypatch.setenv("BATCHERY_MEDIA", json.dumps({"roots": [str(tmp_path)]}))
    settings = ModelSettings(kind="image_embedding", model=str(build_vision("clip")))
    with Engine(settings, device="cpu") as engine:
        whole, path = engine.call([picture, "a.png"])
        assert whole["vector"] == pytest.approx(path["vector"])
        with pytest.raises(InvalidItem, match="no such file"):
            engine.call("b.png")
