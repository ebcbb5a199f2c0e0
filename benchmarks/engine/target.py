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
from benchmarks.engine.models import model_folder
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


@contextmanager
def target_for(
    options: argparse.Namespace,
    queues: Mapping[str, int] | None = None,
    loop_tokens: int | None = None,
) -> Iterator[Target]:
    """The target of a benchmark, in a folder that goes with it; our processes are told of it.

    Args:
        options: With `model`, `device`, `dtype`, `batch_size` and `threads`.
        queues: As for `configure`; `embed` alone if None.
        loop_tokens: As for `resolve_target`.
    """
    if options.threads:
        # All systems inherit it.
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory(prefix="batchery-bench-") as temporary:
        folder = model_folder(options.model, Path(temporary))
        target = resolve_target(
            folder, options.device, options.dtype, options.batch_size, loop_tokens
        )
        graphs = getattr(options, "cuda_graphs", "auto")
        configure(target, queues or {"embed": target.batch_size}, cuda_graphs=graphs)
        yield target


def resolve_target(
    folder: Path,
    device: str,
    dtype: str | None,
    batch_size: int,
    loop_tokens: int | None = None,
) -> Target:
    """Fills in what depends on the device."""
    kind = device.partition(":")[0]
    return Target(
        folder=folder,
        device=device,
        dtype=dtype or DTYPES.get(kind, "fp32"),
        batch_size=batch_size,
        loop_tokens=(
            (loop_tokens, loop_tokens) if loop_tokens else LOOP_TOKENS.get(kind, LOOP_TOKENS["cpu"])
        ),
    )


def configure(target: Target, queues: Mapping[str, int], cuda_graphs: str = "auto") -> None:
    """Tells our processes, which inherit the environment, of the model.

    Args:
        target: The model.
        queues: Name of each queue and task, and the size of its batches.
        cuda_graphs: The setting of the model.
    """
    model = {
        "kind": "embedding",
        "model": str(target.folder),
        "max_length": LONGEST,
        "dtype": target.dtype,
        "cuda_graphs": cuda_graphs,
    }
    os.environ["BATCHERY_MODELS"] = json.dumps(
        {name: {**model, "max_batch_size": size} for name, size in queues.items()}
    )


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
