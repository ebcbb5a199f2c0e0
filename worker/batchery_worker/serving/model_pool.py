"""The models of a device and the memory that they share.

Which of them make room for another one is decided in `batching/residency.py`.
"""

import gc
import logging
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from batchery.errors import ModelLoadError
from batchery.execution.bisect_failures import has_run_out
from batchery_worker.batching.placement import EVERYWHERE
from batchery_worker.batching.residency import HeldModel, choose_victims
from batchery_worker.ipc.messages import Setup
from batchery_worker.memory import Memory
from batchery_worker.serving.served_model import LoadedModel

logger = logging.getLogger("batchery.device")

#: How long a load takes of which nothing is known, in seconds.
USUAL_LOAD_S = 1.0

#: Why a model is here that was loaded for a job, and that the device was not told of.
FIRST_DEMAND = "first demand"


@dataclass(slots=True)
class ModelRecord:
    """What is known of a model, loaded or not."""

    #: Measured, or estimated before the first load; None if nobody knows.
    held_bytes: int | None = None
    #: How long the last load took; None before the first.
    load_s: float | None = None
    #: Number of loads.
    loads: int = 0
    #: The last instance, of which only what it has learned is left.
    last: LoadedModel | None = None


class ModelPool:
    """Loads models at demand; for the main thread, but for `loaded` and `figures`."""

    def __init__(
        self,
        load: Callable[[str], LoadedModel],
        estimate: Callable[[str], int | None],
        setup: Setup,
        memory: Memory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Loads nothing yet.

        Args:
            load: Loads a model by the name of its task; raises `ModelLoadError`.
            estimate: Says how many bytes it will take; None if that is not known.
            setup: Of the device.
            memory: Of the device.
            clock: Seconds, on the scale of the models.
        """
        #: The models that are ready for a batch.
        self.loaded: dict[str, LoadedModel] = {}
        self._device = setup.device
        self._why = setup.models
        self._pinned = setup.pinned
        #: What is known of each model that was loaded, or may be.
        self.records: dict[str, ModelRecord] = {name: ModelRecord() for name in self._why}
        self._memory = memory
        self._load = load
        self._estimate = estimate
        self._clock = clock
        #: Maximum memory of the models; None for no limit.
        self.limit_bytes = setup.model_memory_bytes or memory.model_bytes()

    def load_first(self, names: Iterable[str]) -> None:
        """Loads the pinned models, and of the others those for which there is memory."""
        for name in sorted(names, key=lambda each: each not in self._pinned):
            if name in self._pinned:
                self.serve(name)
            elif self._over(self._expect_bytes(name)) <= 0:
                self._load_anew(name, ())
                if self._over(0) > 0:
                    self._drop([name])
            if name not in self.loaded:
                logger.info("%s: not loaded on %s before it has jobs", name, self._device)

    def serve(self, name: str, wanted: Collection[str] = ()) -> LoadedModel:
        """Makes a model ready; others make room for it.

        Raises:
            ModelLoadError: It cannot be loaded, or does not fit; says what would have to be.
        """
        if name not in self.loaded:
            self._make_room(name, self._expect_bytes(name), wanted)
            self._load_anew(name, wanted)
            # It may be larger than was expected.
            self._make_room(name, 0, wanted)
        return self.loaded[name]

    def expect_load_s(self, name: str) -> float:
        """How long it will take until a model is ready, in seconds; 0 if it is."""
        if name in self.loaded:
            return 0.0
        record = self.records.get(name, ModelRecord())
        if record.load_s is not None:
            return record.load_s
        known_s = [each.load_s for each in self.records.values() if each.load_s is not None]
        return fmean(known_s) if known_s else USUAL_LOAD_S

    def report(self) -> dict[str, Any]:
        """The figures of all models, and of the memory that they share."""
        return {"models": self.figures(), "memory": self._memory.figures()}

    def figures(self) -> dict[str, dict[str, Any]]:
        """What `batchery stats` shows of each model."""
        return {name: self._describe(name, record) for name, record in [*self.records.items()]}

    def _describe(self, name: str, record: ModelRecord) -> dict[str, Any]:
        why = self._why.get(name, FIRST_DEMAND)
        if why == EVERYWHERE and self.limit_bytes is not None:
            why = f"{why}, {FIRST_DEMAND}"
        served = self.loaded.get(name)
        figures: dict[str, Any] = {
            "state": "loaded" if served else "not loaded",
            "why": f"{why}, pinned" if name in self._pinned else why,
            "held_bytes": record.held_bytes,
            "load_s": record.load_s,
            "loads": record.loads,
            "reload_s": self.expect_load_s(name),
        }
        if served is not None and served.used_s is not None:
            figures["used_at_s"] = round(time.time() - self._clock() + served.used_s)
        return figures if served is None else {**served.figures(), **figures}

    def _expect_bytes(self, name: str) -> int:
        record = self.records.setdefault(name, ModelRecord())
        if record.held_bytes is None and self.limit_bytes is not None:
            record.held_bytes = self._estimate(name)
        return record.held_bytes or 0

    def _over(self, more_bytes: int) -> int:
        """By how many bytes the models are above the limit, if they grow by some."""
        if self.limit_bytes is None:
            return 0
        held_bytes = sum(self.records[name].held_bytes or 0 for name in self.loaded)
        return held_bytes + more_bytes - self.limit_bytes

    def _make_room(self, name: str, more_bytes: int, wanted: Collection[str]) -> None:
        over_bytes = self._over(more_bytes)
        if over_bytes <= 0:
            return
        victims = choose_victims(self._list_others(name, wanted), over_bytes)
        if victims is None:
            self._drop([each for each in [name] if each in self.loaded])
            raise ModelLoadError(self._explain(name))
        self._drop(victims, name)

    def _list_others(self, name: str, wanted: Collection[str]) -> list[HeldModel]:
        """The models that could make room for another one."""
        now_s = self._clock()
        return [
            HeldModel(
                each,
                self.records[each].held_bytes or 0,
                self.records[each].load_s or USUAL_LOAD_S,
                now_s - (served.used_s or served.loaded_s),
                each in wanted,
            )
            for each, served in self.loaded.items()
            if each != name and each not in self._pinned
        ]

    def _explain(self, name: str) -> str:
        pinned = [each for each in self.loaded if each in self._pinned and each != name]
        held_bytes = sum(self.records[each].held_bytes or 0 for each in pinned)
        taken = f", of which pinned models hold {write_mib(held_bytes)}" if pinned else ""
        return (
            f"model {name!r}: needs {write_mib(self.records[name].held_bytes or 0)} on"
            f" {self._device}, and its models may have {write_mib(self.limit_bytes or 0)}"
            f"{taken}; raise model_memory_bytes, or give it other devices"
        )

    def _load_anew(self, name: str, wanted: Collection[str]) -> None:
        began_s = self._clock()
        while True:
            try:
                served = self._load(name)
                break
            except ModelLoadError as error:
                # Others than these models may have memory of the device.
                victims = choose_victims(self._list_others(name, wanted), 1)
                if not victims or not has_run_out(error):
                    raise
                self._drop(victims, name)
        self.keep(served, self._clock() - began_s)

    def keep(self, served: LoadedModel, load_s: float) -> None:
        """Takes in a model whose load took so many seconds."""
        record = self.records.setdefault(served.name, ModelRecord())
        if record.last is not None:
            served.inherit(record.last)
        served.loaded_s = self._clock()
        record.held_bytes, record.load_s = served.loaded_bytes, load_s
        record.loads += 1
        self.loaded[served.name] = served

    def _drop(self, names: Sequence[str], successor: str | None = None) -> None:
        for name in names:
            if successor is not None:
                logger.info("%s dropped on %s for %s", name, self._device, successor)
            before_bytes = self._memory.allocated_bytes()
            served = self.loaded.pop(name)
            self.records[name].last = served
            is_there = weakref.ref(served.unload())
            freed_bytes = before_bytes - self._memory.allocated_bytes()
            is_freed = freed_bytes >= served.loaded_bytes / 2 or not before_bytes
            if is_there() is not None or not is_freed:
                # Its parts refer to each other in circles. It takes a second, so only then.
                gc.collect()
        self._memory.release()


def write_mib(size_bytes: int) -> str:
    """A size in MiB, for people."""
    return f"{size_bytes / 2**20:,.1f} MiB"
