"""One step of texts that grow, by each attention that the device has: where its time goes."""

import argparse
import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.engine.texts import reference_words
from benchmarks.peers.peer import timed

#: Words of each prompt, and steps that are measured once all texts have their first token.
PROMPT_WORDS, STEPS, WARM_UP_STEPS = 300, 40, 5

#: Parts of a step -> method of the batch or the model. What a CUDA device computes is waited for
#: where its tokens are chosen.
PARTS = {
    "prepare": "prepare_next_batch",
    "launch": "_generation_step",
    "choose": "_choose",
    "update": "accept",
    "write": "_advance",
}


def measure(console: Console, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one attention after the other, each with the model loaded anew."""
    module: Any = import_module("batchery_worker.models.generation.model")
    known: list[str] = []
    usual = module.attentions

    def note(model: Any, may_graph: bool) -> tuple[str, ...]:
        known[:] = usual(model, may_graph)
        return tuple(known)

    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, module, "attentions", usual)
        module.attentions = note
        rows.append(measure_step(folder, options))
        for name in known[1:]:
            console.print(f"next: {name}")
            module.attentions = lambda *_, name=name: (name,)
            # The model before is gone.
            gc.collect()
            rows.append(measure_step(folder, options))
    first, last = rows[0]["step_ms"], rows[-1]["step_ms"]
    claim = {"claim": "the attention that is chosen is the quickest", "holds": first <= last}
    return {
        "texts": options.slots,
        "prompt_words": PROMPT_WORDS,
        "rows": rows,
        "verdicts": [{**claim, "found": f"{last / first:.1f} times the last one's speed"}],
    }


def measure_step(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Loads the model, fills all slots, and measures steps."""
    from batchery.settings import ModelSettings
    from batchery_worker.models.generation.model import GenerationModel

    settings = {"kind": "generation", "model": str(folder), "dtype": options.dtype}
    settings |= {"slots": options.slots, "max_length": options.max_length}
    settings["cache_tokens"] = options.slots * options.max_length
    model = GenerationModel(ModelSettings.model_validate(settings))
    load_s = timed(lambda: model.load(options.device))
    fill(model, options)
    prompts_s = timed(lambda: read_prompts(model))
    for _ in range(WARM_UP_STEPS):
        model.step()
    with timed_parts(model) as parts:
        times_ms = [timed(model.step) * 1e3 for _ in range(STEPS)]
    step_ms = statistics.median(times_ms)
    row = {
        "attention": model.model.config._attn_implementation,
        "load_s": round(load_s, 2),
        "prompts_s": round(prompts_s, 2),
        "step_ms": round(step_ms, 2),
        "parts_ms": {name: round(ms / STEPS, 2) for name, ms in parts.items()},
        "tokens_per_s": round(options.slots / step_ms * 1e3),
    }
    model.unload()
    return row


def fill(model: Any, options: argparse.Namespace) -> None:
    """Has a text of its own in each slot, which does not end while it is measured."""
    draw = random.Random(1)
    words = reference_words()
    new_tokens = options.max_length // 4
    for slot in range(options.slots):
        begin = draw.randrange(len(words) - PROMPT_WORDS)
        text = " ".join(words[begin : begin + PROMPT_WORDS])
        keywords = {"max_new_tokens": new_tokens, "ignore_eos": True}
        ids = model.tokenizer(text)["input_ids"][: options.max_length - new_tokens]
        (prepared,) = model.preprocess([ids], **keywords)
        model.join(slot, prepared, (), **keywords)


def read_prompts(model: Any) -> None:
    """Steps until each text has its first token."""
    while not all(text.tokens for text in model._texts.values()):
        model.step()


@contextlib.contextmanager
def timed_parts(model: Any) -> Iterator[Mapping[str, float]]:
    """Adds up the milliseconds of each part of a step, inside the context."""
    parts = dict.fromkeys(PARTS, 0.0)
    holders = (model, model._batch, model._batch._processor)

    def adding(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return inner(*args, **keywords)
            finally:
                parts[name] += (time.perf_counter() - began_s) * 1e3

        return call

    with contextlib.ExitStack() as stack:
        for name, method in PARTS.items():
            holder = next(each for each in holders if hasattr(each, method))
            setattr(holder, method, adding(name, getattr(holder, method)))
            stack.callback(delattr, holder, method)
        yield parts


def show(console: Console, report: Mapping[str, Any]) -> None:
    """Prints a table, ready for a page of docs."""
    table = Table("attention", "step", *PARTS, "tokens/s", "load", box=box.MARKDOWN)
    for row in report["rows"]:
        parts = (f"{row['parts_ms'][name]} ms" for name in PARTS)
        numbers = (f"{row['tokens_per_s']:,}", f"{row['load_s']} s")
        table.add_row(row["attention"], f"{row['step_ms']} ms", *parts, *numbers)
    console.print(table)
