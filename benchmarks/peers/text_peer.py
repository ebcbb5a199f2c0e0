"""What all peers that compute in their own process share: texts in, JSON of vectors out.

Nothing but the standard library, numpy and orjson. One line of JSON on standard input is one run,
and one line on standard output answers it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

import numpy as np


class Embedder(Protocol):
    """One system, loaded."""

    def embed(self, texts: Sequence[str]) -> Any:
        """Embeds all texts; returns their vectors, as arrays, in order."""


def encode(vectors: Any, tokens: Sequence[int]) -> list[bytes]:
    """Writes results as a worker stores them, and with the same encoder.

    Python's own takes twenty times as long: longer than a GPU takes for a short text.

    Args:
        vectors: (N, D), float32, of numpy.
        tokens: Of each text; 0 where a system does not say.
    """
    # Here, as peers that have no vectors need not have it.
    import orjson

    return [
        orjson.dumps({"tokens": count, "vector": vector}, option=orjson.OPT_SERIALIZE_NUMPY)
        for count, vector in zip(tokens, vectors, strict=True)
    ]


def arguments() -> argparse.Namespace:
    """What every peer is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--batch-size", type=int, default=64, help="texts, of other projects")
    parser.add_argument("--padded-tokens", type=int, default=384, help="of a batch, of one loop")
    parser.add_argument("--packed-tokens", type=int, default=1024, help="of a batch, of one loop")
    return parser.parse_args()


def take_stdout() -> TextIO:
    """Where answers go; whatever a library prints from now on goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def serve(
    answer: Callable[[Mapping[str, Any]], Mapping[str, Any]], out: TextIO | None = None
) -> None:
    """Answers one request after the other until the input ends.

    Args:
        answer: Takes a request, returns plain JSON.
        out: Of `take_stdout`, where that was needed before.
    """
    with out or take_stdout() as file:
        print(json.dumps({"ready": os.getpid()}), file=file, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=file, flush=True)


def timed(embedder: Embedder) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Makes an answer of a system: how long all texts took, encoded results included."""

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        started_s, used_s = time.perf_counter(), time.process_time()
        vectors = np.stack(embedder.embed(request["texts"])).astype(np.float32, copy=False)
        results = encode(vectors, [0] * len(vectors))
        return {
            "seconds": time.perf_counter() - started_s,
            "cpu_s": time.process_time() - used_s,
            "results": [each.decode() for each in results] if request.get("keep") else [],
        }

    return answer
