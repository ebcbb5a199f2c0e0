"""Writes the right vectors of MiniLM's texts into a file, with which all systems are compared."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.inprocess_workloads import Encoder

#: Texts of a pass.
PASS_TEXTS = 16


def main() -> None:
    """Computes texts of similar length together."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--texts", "--vectors"):
        parser.add_argument(name, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    options = parser.parse_args()
    texts = json.loads(Path(options.texts).read_text(encoding="utf-8"))
    encoder = Encoder(options.model, options.max_tokens)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    vectors: list[Any] = [None] * len(texts)
    for start in range(0, len(order), PASS_TEXTS):
        part = order[start : start + PASS_TEXTS]
        for place, vector in zip(part, encoder.embed([texts[each] for each in part]), strict=True):
            vectors[place] = vector
    np.save(options.vectors, np.stack(vectors))


if __name__ == "__main__":
    main()
