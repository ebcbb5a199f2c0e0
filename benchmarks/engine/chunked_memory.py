"""How many more tokens fit into the same memory if the wide part of each layer runs in chunks.

Inference keeps no activations, so a pass needs the memory of its widest moment: the feed-forward
part, four times as wide as all else. Each way is measured in a process of its own, by the maximum
of its main memory above what it has once the model is loaded.

    python -m benchmarks.engine.chunked_memory --json chunked_memory.json
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModel

from benchmarks.engine.models import MODELS, VOCABULARY, model_folder
from benchmarks.hardware import hardware, write_report

#: Tokens of a chunk; 0 is the whole pass.
CHUNKS = (0, 1024, 256)

#: Length of the texts in tokens.
LENGTH = 256

MIB = 2**20


def main() -> None:
    """Measures all ways, or, as a child, one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="bert-base")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, chunk = options.child
        print(json.dumps(measure(folder, int(chunk), options.tokens, options.rounds)))
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="chunked-memory-") as made:
        folder = model_folder(options.model, Path(made))
        for chunk in CHUNKS:
            command = [sys.executable, "-m", "benchmarks.engine.chunked_memory"]
            command += ["--tokens", str(options.tokens), "--rounds", str(options.rounds)]
            done = subprocess.run(
                [*command, "--child", str(folder), str(chunk)],
                capture_output=True,
                text=True,
                check=True,
            )
            rows.append({"chunk_tokens": chunk, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1])
    setup = {"model": options.model, "tokens": options.tokens}
    write_report(options.json, {"hardware": hardware(), **setup, "rows": rows})


def measure(folder: str, chunk: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Memory and time of passes whose feed-forward part runs in chunks of so many tokens."""
    model: Any = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    for layer in model.encoder.layer if chunk else ():
        layer.feed_forward_chunk = in_chunks(layer.feed_forward_chunk, chunk)
    ids = torch.randint(1000, VOCABULARY, (tokens // LENGTH, LENGTH))
    seconds = []
    with torch.inference_mode():
        model(ids[:1])
        loaded_bytes = psutil.Process().memory_info().rss
        for _ in range(rounds):
            began_s = time.process_time()
            model(ids)
            seconds.append(time.process_time() - began_s)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "peak_mib": round((peak_bytes - loaded_bytes) / MIB),
        "kib_per_token": round((peak_bytes - loaded_bytes) / tokens / 1024, 1),
        "cpu_s": round(statistics.median(seconds), 3),
    }


def in_chunks(whole: Callable[[Tensor], Tensor], chunk: int) -> Callable[[Tensor], Tensor]:
    """The same function of tokens, called for some of them at a time."""

    def feed_forward(hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        made = torch.empty_like(rows)
        for start in range(0, len(rows), chunk):
            made[start : start + chunk] = whole(rows[start : start + chunk])
        return made.view_as(hidden)

    return feed_forward


if __name__ == "__main__":
    main()
