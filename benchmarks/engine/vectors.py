"""Texts of log-normal length and their right vectors, in files, for whoever compares answers."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.texts import read_texts
from benchmarks.venvs import ROOT

#: Different texts.
TEXTS = 256


def write_vectors(model: Path, folder: Path, max_tokens: int) -> dict[str, str]:
    """Writes both; returns the options by which scripts in `peers/` find them.

    Args:
        model: Folder of the model.
        folder: Where they go.
        max_tokens: Of the longest text.
    """
    texts = folder / "texts.json"
    texts.write_text(json.dumps(read_texts("log-normal", TEXTS, model, max_tokens)))
    given = {
        "--model": str(model),
        "--texts": str(texts),
        "--vectors": str(folder / "vectors.npy"),
        "--max-tokens": str(max_tokens),
    }
    # In a process of its own: this one never loads torch.
    script = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers.right_vectors"]
    subprocess.run(
        [*script, *(part for pair in given.items() for part in pair)], cwd=ROOT, check=True
    )
    return given
