"""The rows of the benchmark, and how each is started."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.engine.child import Child
from benchmarks.engine.systems import INFINITY, TORCH
from benchmarks.peers.inprocess_peer import ASYNCIO, THREADS
from benchmarks.venvs import python_of

#: A function that returns its list, one that sleeps, and a model.
NO_OP, SLEEP, MINILM = WORKLOADS = "no-op", "sleep", "MiniLM"

MODES = THREADS, ASYNCIO

#: The version of transformers that is ours, so that the function is the same.
TRANSFORMERS = "transformers==5.23.0"


@dataclass(frozen=True, slots=True)
class System:
    """One way of calling a function, or a model, from many callers."""

    name: str
    #: Script in `peers/`, and what it is asked for.
    module: str
    choice: str
    #: How it can be called.
    modes: Sequence[str] = MODES
    workloads: Sequence[str] = WORKLOADS
    #: Of its environment; none means the one that runs now.
    requirements: Sequence[str] = ()
    venv: str = ""
    #: Whether it computes by a forward pass of its own.
    has_own_model: bool = False
    #: What `batchery` must have; else the system is skipped.
    needs: str = "batched"


#: The environment of those that agree on their dependencies.
_BATCHERS: Mapping[str, Any] = MappingProxyType(
    {
        "requirements": (TORCH, TRANSFORMERS, "batched==0.1.5", "async-batcher==0.2.2"),
        "venv": "batchers",
    }
)

SYSTEMS = (
    # A hundred calls can sleep side by side in the time of one, which no device does.
    System("no batching", "inprocess_plain", "no batching", workloads=[NO_OP, MINILM]),
    System("lock", "inprocess_plain", "lock"),
    System("ours: batched", "inprocess_batchery", "batched"),
    System("ours: batched, length=", "inprocess_batchery", "length", workloads=[MINILM]),
    System(
        "ours: Engine",
        "inprocess_batchery",
        "engine",
        modes=[ASYNCIO],
        workloads=[MINILM],
        has_own_model=True,
        needs="Engine",
    ),
    System("batched 0.1.5, dynamically", "inprocess_batched", "dynamically", **_BATCHERS),
    System(
        "batched 0.1.5, aio.dynamically", "inprocess_batched", "aio", modes=[ASYNCIO], **_BATCHERS
    ),
    System(
        "async-batcher 0.2.2",
        "inprocess_async_batcher",
        "process",
        modes=[ASYNCIO],
        **_BATCHERS,
    ),
    System(
        "infinity_emb 0.0.78",
        "inprocess_infinity",
        "engine",
        modes=[ASYNCIO],
        workloads=[MINILM],
        # The environment that the engine's benchmark has, too.
        requirements=INFINITY,
        venv="infinity_emb",
        has_own_model=True,
    ),
)

#: Those that are not measured, and why.
LEFT_OUT = MappingProxyType(
    {
        "litserve 0.2.19": "its batching loop takes a queue and a transport, and turns without a"
        " pause in a process of its own; between callers and that loop is its HTTP server alone, so"
        " that a row in process would measure our code around it"
    }
)


def missing(system: System) -> str:
    """Why a system cannot be measured; empty if it can."""
    if hasattr(importlib.import_module("batchery"), system.needs):
        return ""
    return f"batchery has no {system.needs}"


@dataclass(slots=True)
class Running:
    """A system in a process of its own, which stands still while others are measured."""

    system: System
    child: Child
    versions: Mapping[str, str] = field(default_factory=dict)

    def suspend(self) -> None:
        """Stops the process where it is: some look for work many times a second."""
        psutil.Process(self.child.pid).suspend()

    def resume(self) -> None:
        """Lets it go on."""
        psutil.Process(self.child.pid).resume()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Has it answer one request, and stand still again."""
        self.resume()
        answer = self.child.ask(request)
        self.suspend()
        return answer


def start(system: System, options: Mapping[str, Any], venvs: Path) -> Running:
    """Starts a system, without waiting for it.

    Args:
        system: What to start.
        options: Of all scripts.
        venvs: Where environments are.
    """
    python = python_of(system.venv, system.requirements, venvs)
    return Running(system, Child(python, system.module, {"--system": system.choice, **options}))
