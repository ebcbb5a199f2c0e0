"""The rows of the engine benchmark, and how each is started."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.engine.child import Child, ChildSystem, options_of
from benchmarks.engine.sample import System
from benchmarks.engine.target import Target
from benchmarks.engine.worker import WholeSystem
from benchmarks.venvs import python_of

#: The same everywhere: a newer one would be another measurement, and gigabytes.
TORCH = "torch==2.13.0"

#: Writes the vectors of all systems as JSON.
ORJSON = "orjson==3.13.0"

SENTENCE_TRANSFORMERS = (TORCH, "transformers==5.23.0", ORJSON, "sentence-transformers==6.2.0")
INFINITY = (TORCH, ORJSON, "infinity_emb[torch]==0.0.78")


@dataclass(frozen=True, slots=True)
class Row:
    """A system that computes in a process of its own."""

    name: str
    #: Script in `peers/`; rows with the same one share a process.
    module: str
    #: What it is asked for, besides texts.
    request: Mapping[str, Any]
    requirements: Sequence[str] = ()


LOOPS = [
    Row("loop: arrival order", "offline_loops", {"loop": "naive"}),
    Row("loop: token budget", "offline_loops", {"loop": "budget"}),
    Row("loop: packed", "offline_loops", {"loop": "packed"}),
    Row("loop: packed, side by side", "offline_loops", {"loop": "side by side"}),
]

PEERS = [
    Row("sentence-transformers 6.2", "sentence_transformers_encode", {}, SENTENCE_TRANSFORMERS),
    Row("batched 0.1", "batched_encode", {}, (*SENTENCE_TRANSFORMERS, "batched==0.1.5")),
    Row("infinity_emb 0.0.78", "infinity_embed", {}, INFINITY),
]

ENGINES = [
    Row("in process", "batchery_engine", {"engine": "torch"}),
    Row("in process, onnx", "batchery_engine", {"engine": "onnx"}),
]

OURS: Mapping[str, Callable[[Target], System]] = {WholeSystem.name: WholeSystem}

#: Only where they are asked for: the whole system with feeders, or many texts in a message.
MANY = 64
FED: Mapping[str, Callable[[Target], System]] = {
    f"whole system, {MANY} a message": partial(WholeSystem, items=MANY),
    **{f"feeders: {count}": partial(WholeSystem, feeders=count) for count in (1, 2, 4, 8, 12)},
    **{
        f"feeders: {count}, {MANY} a message": partial(WholeSystem, feeders=count, items=MANY)
        for count in (1, 2, 4, 8, 12)
    },
}

#: The loop that everybody writes first, against which the others are counted.
NAIVE = LOOPS[0].name

NAMES = (*(row.name for row in (*LOOPS, *PEERS, *ENGINES)), *OURS)


@contextlib.contextmanager
def running(target: Target, chosen: Sequence[str]) -> Iterator[list[System]]:
    """Starts systems together, all models loaded, and ends them when the block ends.

    Args:
        target: What they run.
        chosen: Of `NAMES`.
    """
    with contextlib.ExitStack() as stack:
        systems: list[System] = []
        children: dict[str, Child] = {}
        for row in (*LOOPS, *PEERS, *ENGINES):
            if row.name in chosen:
                if row.module not in children:
                    python = python_of(row.requirements)
                    children[row.module] = Child(python, f"peers.{row.module}", options_of(target))
                    stack.callback(children[row.module].close)
                systems.append(ChildSystem(row.name, children[row.module], row.request))
        for name, make in {**OURS, **FED}.items():
            if name in chosen:
                systems.append(make(target))
                stack.callback(systems[-1].stop)
        for child in children.values():
            child.wait_ready()
        for system in systems:
            system.wait_ready()
        yield systems
