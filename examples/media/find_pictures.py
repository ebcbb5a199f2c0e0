"""Finds pictures by what a text says of them.

    python find_pictures.py photos "a cat on a sofa"

README.md says which model it needs. Vectors are kept in `FOLDER/vectors.npz`: only pictures that
are not there yet go through the model.
"""

import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchery import Client, to_numpy

REDIS_URL = os.environ.get("BATCHERY_REDIS_URL", "redis://localhost:6379/0")

SUFFIXES = (".gif", ".jpeg", ".jpg", ".png", ".tif", ".webp")

#: Pictures that are in flight at a time.
WINDOW = 64

#: Pictures that are shown.
SHOWN = 5

Vectors = dict[str, NDArray[np.float32]]


def embed(client: Client, folder: Path) -> Vectors:
    """The vector of each picture of a folder, by its path there; each has length 1."""
    kept = folder / "vectors.npz"
    vectors: Vectors = {}
    if kept.exists():
        table = np.load(kept)
        vectors = dict(zip(table["names"].tolist(), table["vectors"], strict=True))
    found = sorted(each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES)
    names = [str(each.relative_to(folder)) for each in found]
    new = [name for name in names if name not in vectors]
    pictures = ((folder / name).read_bytes() for name in new)
    # Vectors come as they travel, in half of the bytes of a list.
    outcomes = client.task("look").as_completed(pictures, window=WINDOW, keeps_base64=True)
    for outcome in outcomes:
        name = new[outcome.index]
        if outcome.error is not None:
            print(f"{name}: {outcome.error}", file=sys.stderr)
        else:
            vectors[name] = to_numpy(outcome.value)
    if new and vectors:
        np.savez(kept, names=np.array(list(vectors)), vectors=np.stack(list(vectors.values())))
    return {name: vectors[name] for name in names if name in vectors}


def find(folder: Path, text: str) -> list[tuple[str, float]]:
    """The pictures that fit a text best, with the cosine of both vectors."""
    with Client(REDIS_URL) as client:
        vectors = embed(client, folder)
        (asked,) = client.task("look").map([{"text": text}])
    if not vectors:
        return []
    scores = np.stack(list(vectors.values())) @ to_numpy(asked)
    best = sorted(zip(vectors, scores.tolist(), strict=True), key=lambda each: -each[1])
    return best[:SHOWN]


if __name__ == "__main__":
    for name, score in find(Path(sys.argv[1]), sys.argv[2]):
        print(f"{score:.3f}  {name}")
