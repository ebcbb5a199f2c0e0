"""Which models stay in the memory of a device, and what waits for one that is not there: pure.

Loading a model takes as long as hundreds of batches, and the device computes nothing meanwhile. So
jobs whose model is loaded keep their turn, and others wait until that is worth a load:

1. Until the oldest of them has waited for as long as the load takes, in its queue or here. The time
   counts by shares: a class with twice the share of those whose turn it is waits half as long. One
   that has half of all time waits twice as long at most, however many models it has: it pays for
   its loads (see `shares.py`), so they are its own affair.
2. Until the device has worked for as long since its last load; and for `WORK_WHEN_BEHIND` times as
   long while a full batch waits for what is loaded. Otherwise two models that take turns would
   spend all its time on loads, and it would never catch up.
3. A device that has nothing else to do loads at once, unless other devices of this worker have the
   model. Then the first rule holds, and no more devices load it at once than have it: those with
   nothing to do would all come for the same jobs, and be missed where they were. After a full batch
   it waits for more of the same for as long as a load, as that may be on its way from the queue.
4. A device that has other work loads a model that others have only if it is on so few devices that
   it would still have fewer than the model of that work, by their shares. Otherwise devices would
   change places, and nobody would have more than before.

Who makes room is the model that was used least recently, as measured in times that it takes to load
it; before it those for which no job waits.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from batchery_worker.batching.shares import KeyFlows
from batchery_worker.job import T

#: How long a device that is behind works between two loads, as a multiple of the second one: loads
#: take a fifth of its time at most.
WORK_WHEN_BEHIND = 4.0

#: A load counts for so many seconds at least, so that nothing is divided by 0.
MIN_LOAD_S = 1e-3


class HeldModel(NamedTuple):
    """A model in the memory of a device."""

    name: str
    held_bytes: int
    #: How long it takes to have it there again.
    reload_s: float
    #: For how long no batch has used it.
    idle_s: float
    #: Whether jobs wait for it.
    is_wanted: bool = False


def choose_victims(models: Sequence[HeldModel], wanted_bytes: int) -> list[str] | None:
    """The models that make room.

    Returns:
        Their names; None if all of them together hold less.
    """
    left, chosen = wanted_bytes, []
    for each in sorted(models, key=_regret):
        if left <= 0:
            break
        chosen.append(each)
        left -= each.held_bytes
    if left > 0:
        return None
    # A large one that came later may make enough room without those before it.
    for each in reversed(chosen):
        if left + each.held_bytes <= 0:
            chosen.remove(each)
            left += each.held_bytes
    return [each.name for each in chosen]


def _regret(model: HeldModel) -> tuple[bool, float]:
    """How much it would be missed; the least goes first."""
    return model.is_wanted, -model.idle_s / max(model.reload_s, MIN_LOAD_S)


class Served(Protocol):
    """Which tasks somebody serves."""

    def serves(self, task: str) -> bool:
        """Whether jobs of a task are for it."""


@dataclass(slots=True, eq=False)
class DeviceModels:
    """The models of a device as the scheduler sees them."""

    #: Models that only other devices serve.
    elsewhere: frozenset[str] = frozenset()
    #: The same of all devices of this worker, itself among them.
    fleet: list["DeviceModels"] = field(default_factory=list)
    #: Models that are not loaded -> how long that takes, in seconds.
    cold: dict[str, float] = field(default_factory=dict)
    #: Models for which a batch has left that will load them.
    loading: set[str] = field(default_factory=set)
    #: When the last load ended, or will end; minus infinity before the first.
    loaded_s: float = -inf
    #: When it last got a full batch: more of the same is probably on its way from the queue.
    full_s: float = -inf
    #: When a model may be loaded that could not be by the last answer of `choose`.
    wake_s: float = inf
    #: Whether its process runs and has said what it has.
    is_known: bool = False

    def __post_init__(self) -> None:
        self.fleet.append(self)

    def serves(self, task: str) -> bool:
        """Whether jobs of a task may come to this device."""
        return task not in self.elsewhere

    def report(self, states: Mapping[str, float]) -> None:
        """Notes what the process has said: each model, and how long it takes until it is loaded.

        Args:
            states: 0 seconds for a model that is loaded.
        """
        self.is_known = True
        self.loading = {name for name in self.loading if states.get(name)}
        self.cold = {
            name: load_s
            for name, load_s in states.items()
            if load_s > 0 and name not in self.loading
        }

    def forget(self) -> None:
        """Notes that the process has ended."""
        self.is_known, self.cold, self.loaded_s, self.full_s = False, {}, -inf, -inf
        self.loading.clear()

    def begin(self, task: str, now_s: float) -> bool:
        """Notes that a batch goes to the device; returns whether its model is loaded for it."""
        load_s = self.cold.pop(task, None)
        if load_s is not None:
            self.loading.add(task)
            self.loaded_s = max(now_s, self.loaded_s) + load_s
        return load_s is not None

    def end_load(self, task: str, now_s: float) -> None:
        """Notes that a load has ended, whether the model could be loaded or not."""
        self.loading.discard(task)
        self.loaded_s = now_s

    def choose(
        self,
        waiting: Collection[KeyFlows[T]],
        now_s: float,
        weigh: Callable[[KeyFlows[T]], float],
        find_part: Callable[[KeyFlows[T]], float],
        *,
        is_idle: bool = True,
    ) -> Collection[KeyFlows[T]]:
        """Leaves out those that must wait for their model.

        Args:
            waiting: What this device may run.
            now_s: The time.
            weigh: The share of those that wait there.
            find_part: The part of the time that their classes and tenants have, who pay for loads.
            is_idle: Whether it runs nothing.
        """
        self.wake_s = inf
        if not self.cold:
            return waiting
        warm = [each for each in waiting if each.key.task not in self.cold]
        share = max(map(weigh, warm), default=0.0)
        devices = max((self._count(each.key.task) for each in warm), default=0)
        is_behind = any(each.items >= each.limits.max_batch_size for each in warm)
        chosen = warm
        for each in waiting:
            if each.key.task not in self.cold:
                continue
            # More jobs for what a busy device has may be here by the time that it is done.
            if not (warm or is_idle) and self._count(each.key.task):
                continue
            ratio = share / weigh(each)
            begin_s = self._begin_s(each, ratio, find_part(each), devices, is_behind)
            if now_s >= begin_s:
                chosen.append(each)
            else:
                self.wake_s = min(self.wake_s, begin_s)
        return chosen

    def _begin_s(
        self, waiting: KeyFlows[T], ratio: float, part: float, devices: int, is_behind: bool
    ) -> float:
        """When a model may be loaded for some jobs.

        Args:
            waiting: The jobs.
            ratio: Share of those that could run at once, in terms of theirs; 0 if there are none.
            part: The part of the time that their classes and tenants have.
            devices: How many devices have the model of those.
            is_behind: Whether a full batch of those waits.
        """
        task = waiting.key.task
        load_s, elsewhere = self.cold[task], self._count(task)
        if not ratio:
            if not elsewhere:
                return -inf
            loading = sum(task in each.loading for each in self.fleet)
            ready = max(1, elsewhere - loading)
            wait_s = load_s * max(1.0, (loading + 1) / ready)
            return max(waiting.oldest_sent_s + wait_s, self.full_s + load_s)
        if elsewhere and (elsewhere + 1) * ratio >= devices:
            return inf
        load_s *= min(ratio, 1 / part)
        work_s = WORK_WHEN_BEHIND * load_s if is_behind else load_s
        return max(waiting.oldest_sent_s + load_s, self.loaded_s + work_s)

    def _count(self, task: str) -> int:
        """How many devices have a model, or load it; one that loads may lose its others."""
        return sum(
            task in each.loading if each.loading else task not in each.cold
            for each in self.fleet
            if each.is_known and each.serves(task)
        )
