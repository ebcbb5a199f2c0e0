"""Tokens per second on mixed lengths: transformers' own ways, our engine, and the whole queue."""

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from batchery_producer import AsyncClient
from benchmarks.engine.child import Child
from benchmarks.engine.sample import cpu_by_name, cpu_since
from benchmarks.generation.served import Served
from benchmarks.generation.workload import Text, draw_texts
from benchmarks.hardware import describe_lengths
from benchmarks.peers.vllm_generate import CACHE_BYTES as VLLM_CACHE_BYTES
from benchmarks.rows import choose, in_turn, median_and_spread, print_table, show_spread

#: The name of our model in the worker, and its first job.
CHAT = "chat"
FIRST = ("The first", {"max_new_tokens": 4})

#: New tokens of the texts that warm up all systems, as many texts as there are slots.
WARM_TOKENS = 4

#: Tokens of one step, in all systems that have one.
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """One system, its texts, once."""

    seconds: float
    cpu_s: float
    tokens: int
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class System:
    """One row."""

    name: str
    run: Callable[[Sequence[Text]], Sample]
    #: Every so manieth of the texts, sorted by length: slow ways shall take minutes, not hours.
    every: int = 1


#: Name of each row of transformers -> its way in `transformers_generate.py`.
WAYS = {
    "one by one": "one by one",
    "static batches, sorted by prompt": "static by prompt",
    "static batches, sorted by length": "static by length",
    "generate_batch": "generate_batch",
}
DIRECT, QUEUE = "our engine", "through the queue"
VLLM, QUEUE_VLLM = "vLLM's generate", "vLLM through the queue"
NAMES = (*WAYS, DIRECT, QUEUE, VLLM, QUEUE_VLLM)

#: Engine of each row that goes through the queue.
ENGINES = {QUEUE: "transformers", QUEUE_VLLM: "vllm"}

#: Script of each other row.
SCRIPTS = {
    **dict.fromkeys(WAYS, "transformers_generate"),
    DIRECT: "batchery_generate",
    VLLM: "vllm_generate",
}

#: Row, the row that it is compared with, and the least ratio that is claimed.
CLAIMS = (
    (QUEUE, "generate_batch", 0.95),
    (DIRECT, "generate_batch", 0.95),
    (QUEUE, "one by one", 3.0),
    (QUEUE, "static batches, sorted by prompt", 1.0),
    (QUEUE, "static batches, sorted by length", 1.0),
    (QUEUE_VLLM, VLLM, 0.95),
)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all systems in turn, so often; returns a row for each, and verdicts."""
    texts = draw_texts(options.texts, options.longest)
    samples: dict[str, list[Sample]] = {}
    with running(folder, options) as systems:
        for system in systems:
            print(f"warming up: {system.name}", flush=True)
            system.run(
                [replace(text, max_new_tokens=WARM_TOKENS) for text in texts[: options.slots]]
            )
        for number, system in in_turn(systems, options.rounds):
            print(f"round {number + 1} of {options.rounds}: {system.name}", flush=True)
            some = sorted(texts, key=lambda text: text.max_new_tokens)[:: system.every]
            chosen = [text for text in texts if text in set(some)]
            samples.setdefault(system.name, []).append(system.run(chosen))
    made: dict[str, Any] = {
        "texts": options.texts,
        "tokens": sum(text.max_new_tokens for text in texts),
        "words_per_prompt": describe_lengths([len(text.prompt.split()) for text in texts]),
        "new_tokens_per_text": describe_lengths([text.max_new_tokens for text in texts]),
        "rounds": options.rounds,
        "slots": options.slots,
        "rows": [row_for(name, samples) for name in NAMES if name in samples],
    }
    return {**made, "verdicts": verdicts(samples)}


@contextlib.contextmanager
def running(folder: Path, options: argparse.Namespace) -> Iterator[Sequence[System]]:
    """Starts what is measured, all models loaded, and ends it with the block."""
    given = {
        "--model": folder,
        "--device": options.device,
        "--dtype": options.dtype,
        "--slots": options.slots,
        "--max-length": options.max_length,
        "--step-tokens": STEP_TOKENS,
    }
    names = [name for name in NAMES if options.vllm_python or "vLLM" not in name]
    wanted = choose([(name, name) for name in names], options.systems)
    with contextlib.ExitStack() as stack:
        children: dict[str, Child] = {}
        for name in wanted:
            if name not in ENGINES:
                python = options.vllm_python if name == VLLM else sys.executable
                way = {"--way": WAYS[name]} if name in WAYS else {}
                children[name] = Child(Path(python), f"peers.{SCRIPTS[name]}", {**given, **way})
                stack.callback(children[name].close)
        systems = []
        for name, child in children.items():
            child.wait_ready()
            every = options.one_in if name == "one by one" else 1
            systems.append(System(name, partial(run_child, child), every))
        for name in wanted:
            if name in ENGINES:
                models = {CHAT: settings(folder, options, ENGINES[name])}
                served = stack.enter_context(Served(models, options.device))
                served.wait_ready(CHAT, *FIRST)
                systems.append(System(name, partial(run_queue, served)))
        yield systems


def settings(
    folder: Path, options: argparse.Namespace, engine: str = "transformers"
) -> Mapping[str, Any]:
    """Of the model in our worker."""
    made = {
        "kind": "generation",
        "engine": engine,
        "model": str(folder),
        "dtype": options.dtype,
        "slots": options.slots,
        "max_length": options.max_length,
        "max_batch_tokens": STEP_TOKENS,
    }
    if engine == "vllm":
        # Without graphs only where there are none, as for vLLM alone.
        is_eager = options.device == "cpu"
        own = {"enforce_eager": is_eager, "kv_cache_memory_bytes": VLLM_CACHE_BYTES}
        return {**made, "engine_options": own, "engine_python": str(options.vllm_python)}
    return {**made, "cache_tokens": options.slots * options.max_length}


def run_child(child: Child, texts: Sequence[Text]) -> Sample:
    """Has a peer generate all texts."""
    answer = child.ask({"jobs": [(text.prompt, text.max_new_tokens) for text in texts]})
    return Sample(answer["seconds"], answer["cpu_s"], answer["tokens"], answer["texts"])


def run_queue(served: Served, texts: Sequence[Text]) -> Sample:
    """Sends all texts as jobs, and awaits all results."""
    processes = dict(served.processes())
    # vLLM's engine is a process of its own, behind the device.
    children = processes["device"].children(recursive=True)
    processes |= {str(child.pid): child for child in children}
    used, began_s = cpu_by_name(processes), time.perf_counter()
    results = asyncio.run(call_all(served.url, texts))
    seconds = time.perf_counter() - began_s
    cpu_s = sum(cpu_since(used, processes).values())
    tokens = sum(result["tokens_out"] for result in results)
    return Sample(seconds, cpu_s, tokens, [result["text"] for result in results])


async def call_all(url: str, texts: Sequence[Text]) -> Sequence[Mapping[str, Any]]:
    """The results of all texts, in order."""
    async with AsyncClient(url) as client:
        call = client.task(CHAT)
        jobs = (call(text.prompt, **text.keywords) for text in texts)
        results: list[Mapping[str, Any]] = await asyncio.gather(*jobs)
    return results


def row_for(name: str, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Median and spread of a system, and its ratios to the others within each round."""
    rates = speeds(samples[name])
    return {
        "system": name,
        **median_and_spread("tokens_per_s", rates),
        "cpu_ms_per_token": round(
            statistics.median(each.cpu_s / each.tokens * 1e3 for each in samples[name]), 2
        ),
        "tokens": samples[name][0].tokens,
        "ratios": {
            other: round(ratio(samples, name, other), 3) for other in samples if other != name
        },
        "same_texts": same_texts(samples, name),
    }


def speeds(samples: Sequence[Sample]) -> Sequence[float]:
    """Tokens per second of each round."""
    return [each.tokens / each.seconds for each in samples]


def ratio(samples: Mapping[str, Sequence[Sample]], name: str, other: str) -> float:
    """How many times as fast one is as another: the median of the rounds."""
    pairs = zip(speeds(samples[name]), speeds(samples[other]), strict=True)
    return statistics.median(one / two for one, two in pairs)


def same_texts(samples: Mapping[str, Sequence[Sample]], name: str) -> str | None:
    """How many texts are those of `generate_batch`, which computes the same in another order."""
    if "generate_batch" not in samples:
        return None
    ours, theirs = samples[name][0].texts, samples["generate_batch"][0].texts
    common = set(theirs)
    return f"{sum(text in common for text in ours)} of {len(ours)}"


def verdicts(samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """What is claimed, whether it holds, and what was found."""
    return [
        {
            "claim": f"{name}: at least {least:g} times the tokens/s of {other}",
            "holds": ratio(samples, name, other) >= least,
            "found": f"{ratio(samples, name, other):.3f}",
        }
        for name, other, least in CLAIMS
        if name in samples and other in samples
    ]


def show(report: Mapping[str, Any]) -> None:
    """Prints a table."""
    heads = ("", "tokens/s", "spread", "of generate_batch", "of one by one", "processor time")
    cells = [
        (
            row["system"],
            f"{row['tokens_per_s']:,}",
            show_spread(row),
            *(_times(row, other) for other in ("generate_batch", "one by one")),
            f"{row['cpu_ms_per_token']} ms/token",
            row["same_texts"] or "",
        )
        for row in report["rows"]
    ]
    print(f"{report['texts']} texts, {report['tokens']:,} tokens, {report['slots']} slots")
    print_table([*heads, "same texts"], cells)


def _times(row: Mapping[str, Any], other: str) -> str:
    return f"{row['ratios'][other]:.2f}" if other in row["ratios"] else ""
