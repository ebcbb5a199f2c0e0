"""Generation with vLLM's own `LLM.generate` and nothing around it; run by the Python that has vLLM.

That environment has psutil, numpy, and nothing of ours.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.peers.generation_jobs import Job, answering, arguments
from benchmarks.peers.text_peer import serve, take_stdout

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: Of keys and values; enough for all slots of the models that are measured here.
CACHE_BYTES = 1 << 30


def load(options: argparse.Namespace) -> Any:
    """Its engine, as `engine_options` of our worker has it."""
    from vllm import LLM

    return LLM(
        options.model,
        dtype=DTYPES[options.dtype],
        max_num_seqs=options.slots,
        max_model_len=options.max_length,
        max_num_batched_tokens=options.step_tokens,
        # On a GPU it has CUDA graphs, as ours has.
        enforce_eager=options.device == "cpu",
        kv_cache_memory_bytes=CACHE_BYTES,
    )


def generate(engine: Any, jobs: Sequence[Job]) -> Sequence[str]:
    """All texts in one call."""
    from vllm import SamplingParams

    wanted = [
        SamplingParams(temperature=0.0, max_tokens=job.tokens, ignore_eos=True) for job in jobs
    ]
    made = engine.generate([job.prompt for job in jobs], wanted, use_tqdm=False)
    return [each.outputs[0].text for each in made]


def used_s() -> float:
    """Processor time of this process and of vLLM's engine, which is its child, in seconds."""
    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Answers runs."""
    options = arguments()
    # vLLM and its engine's process print while they load.
    out = take_stdout()
    engine = load(options)
    serve(answering(lambda jobs: generate(engine, jobs), used_s), out)


if __name__ == "__main__":
    main()
