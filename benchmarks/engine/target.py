"""What all systems of the engine benchmarks run: one model, on one device."""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.gpu import gpu_name
from benchmarks.engine.models import MODELS, model_folder
from benchmarks.engine.texts import LONGEST, lengths_of
from benchmarks.hardware import describe_lengths, hardware

#: Tokens of a batch of the loops that have a budget, padded and packed, by kind of device. On a CPU
#: the best of 128 to 1,024 and of 256 to 4,096 for MiniLM and log-normal lengths, on one thread;
#: for other models, and on a GPU, where these are guesses, look for the best by `--loop-tokens`.
LOOP_TOKENS = {"cpu": (384, 1_024), "cuda": (16_384, 16_384)}

#: Texts of a batch of other projects on a CPU, which pad to the longest one.
PEER_BATCH_SIZE = 64

#: Number format where none is asked for.
DTYPES = {"cpu": "fp32", "cuda": "bf16"}


@dataclass(frozen=True, slots=True)
class Target:
    """One model, on one device."""

    #: Files of the model.
    folder: Path
    #: As torch spells it: `cpu`, `cuda:0`.
    device: str
    #: `fp32`, `bf16` or `fp16`.
    dtype: str
    #: Maximum texts of a batch in our worker.
    batch_size: int
    #: Maximum tokens of a batch in the loops with a budget, padded and packed. Our device uses its
    #: default.
    loop_tokens: tuple[int, int]

    @property
    def peer_batch_size(self) -> int:
        """Texts of a batch of other projects: on a CPU fewer, as they would pad more."""
        return PEER_BATCH_SIZE if self.device == "cpu" else self.batch_size


def model_parser(
    description: str | None, model: str = MODELS[0], batch_size: int = 64
) -> argparse.ArgumentParser:
    """The options that all benchmarks of a model have, with the defaults of one of them."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default=model)
    parser.add_argument("--device", default="cpu", help="as torch spells it: cpu, cuda:0")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="fp32 on a CPU, or bf16")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="of our worker")
    parser.add_argument("--threads", type=int, help="of torch in every system; its own choice else")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


@contextmanager
def target_for(
    options: argparse.Namespace,
    queues: Mapping[str, int] | None = None,
    loop_tokens: int | None = None,
) -> Iterator[Target]:
    """The target of a benchmark, in a folder that goes with it; our processes are told of it.

    Args:
        options: With `model`, `device`, `dtype`, `batch_size` and `threads`.
        queues: Name of each queue and task, and the size of its batches; `embed` alone if None.
        loop_tokens: Tokens of a batch, of the loops that have a budget.
    """
    if options.threads:
        # All systems inherit it.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="batchery-bench-") as temporary:
        folder = model_folder(options.model, Path(temporary))
        kind = options.device.partition(":")[0]
        target = Target(
            folder=folder,
            device=options.device,
            dtype=options.dtype or DTYPES.get(kind, "fp32"),
            batch_size=options.batch_size,
            loop_tokens=(
                (loop_tokens, loop_tokens)
                if loop_tokens
                else LOOP_TOKENS.get(kind, LOOP_TOKENS["cpu"])
            ),
        )
        model = {
            "kind": "embedding",
            "model": str(target.folder),
            "max_length": LONGEST,
            "dtype": target.dtype,
        }
        sizes = queues or {"embed": target.batch_size}
        # Our processes inherit it.
        os.environ["BATCHERY_MODELS"] = json.dumps(
            {name: {**model, "max_batch_size": size} for name, size in sizes.items()}
        )
        yield target


def about(
    target: Target, options: argparse.Namespace, texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """What the benchmarks of a model write beside their rows, while its files are there.

    Args:
        target: What they run.
        options: Those of any of them.
        texts: Of each workload.
    """
    lengths = {name: lengths_of(each, target.folder) for name, each in texts.items()}
    return {
        "hardware": {**hardware(), "gpu": gpu_name(options.device)},
        "model": options.model,
        "device": options.device,
        "dtype": target.dtype,
        "threads": options.threads,
        "tokens_per_text": {name: describe_lengths(each) for name, each in lengths.items()},
    }
