"""A tiny model of pictures behind real workers, and the processes that read for it."""

import json
import os
from pathlib import Path
from typing import Any

import psutil

from support.harness import Worker, command_line
from support.patience import patient
from support.pictures import draw, encode, save_vision_model

PICTURE = encode(draw(64, 48))


def make_folder(folder: Path) -> Path:
    """Writes a model, and below `photos` a picture, and ways that lead out of there."""
    save_vision_model(folder / "clip", "clip")
    photos = folder / "photos"
    photos.mkdir()
    (photos / "one.png").write_bytes(PICTURE)
    (folder / "secret.png").write_bytes(PICTURE)
    (photos / "way-out.png").symlink_to(folder / "secret.png")
    (photos / "way-up").symlink_to(folder)
    os.mkfifo(photos / "pipe.png")
    return folder


def make_variables(folder: Path, **media: Any) -> dict[str, str]:
    """The environment of a worker that has the model as `see`, and may read what is there."""
    model = {"kind": "image_embedding", "model": str(folder / "clip"), "max_batch_size": 16}
    places = {"roots": [str(folder / "photos")], "hosts": ["127.0.0.1"]}
    media = {**places, "timeout_s": patient(60), **media}
    return {"BATCHERY_MODELS": json.dumps({"see": model}), "BATCHERY_MEDIA": json.dumps(media)}


def list_readers(worker: Worker) -> list[psutil.Process]:
    """The processes that read items: those that were forked by the first one."""
    family = psutil.Process(worker.pid).children(recursive=True)
    first = [each for each in family if "media.reader_process" in command_line(each)]
    return [each for each in first if each.ppid() in {other.pid for other in first}]
