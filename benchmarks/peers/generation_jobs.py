"""What all peers that generate texts in their own process share: jobs in, texts out."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

#: One answer of a run: its texts, in the order of the jobs.
Run = Callable[[Sequence["Job"]], Sequence[str]]


class Job(NamedTuple):
    """One text: as many tokens as it says, whatever the model thinks of its end."""

    prompt: str
    tokens: int


def arguments() -> argparse.Namespace:
    """What every peer is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--slots", type=int, default=16, help="texts at once")
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a text and prompt")
    parser.add_argument("--step-tokens", type=int, default=512, help="most tokens of one pass")
    parser.add_argument("--way", default="", help="which of its ways")
    return parser.parse_args()


def answering(
    run: Run, clock: Callable[[], float] = time.process_time
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Makes an answer of a way to generate: how long all jobs took, tokenizer included.

    Args:
        run: The way.
        clock: Processor time that was used so far, in seconds.
    """

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        jobs = [Job(*each) for each in request["jobs"]]
        started_s, used_s = time.perf_counter(), clock()
        texts = run(jobs)
        return {
            "seconds": time.perf_counter() - started_s,
            "cpu_s": clock() - used_s,
            "tokens": sum(each.tokens for each in jobs),
            "texts": list(texts),
        }

    return answer
