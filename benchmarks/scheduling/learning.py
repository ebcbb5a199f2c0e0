"""What a simulation must know of a worker, learned from a trace that was played on it: pure."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchery_worker.batching.cost_model import BELIEVED, CostModel, Costs
from benchmarks.scheduling.playing import Call, Heard, Played

#: Fewest batches from which the time between two of them is believed.
MIN_GAPS = 5


class Ran(NamedTuple):
    """A batch, as the clients of its jobs saw it."""

    device: str
    #: When the first of its results came, in seconds after the begin of the trace.
    heard_s: float
    items: int
    #: 0 where nobody counts them.
    tokens: int
    forward_ms: float
    #: Between the moment when the worker sent it to the device, and its begin.
    queued_ms: float
    #: The longest that a job of it waited in the worker.
    waited_ms: float

    @property
    def units(self) -> int:
        """What its time depends on: its tokens, or else its items."""
        return self.tokens or self.items


@dataclass(frozen=True, slots=True)
class Learned:
    """Options of `batchery simulate`, but for `noise` in milliseconds."""

    pass_ms: float
    item_ms: float
    token_ms: float
    #: Standard deviation of the logarithm of what batches took, divided by what they should.
    noise: float
    #: From the end of a batch to the begin of the next one, if that waited for it in the worker:
    #: the results are stored, the worker hears of it and forms the next batch, the device gets it.
    prepare_ms: float = 0.0
    #: What is left of a lonely job's time: the way from the client to the worker.
    overhead_ms: float = 0.0


def learned(calls: Sequence[Call], played: Played, lonely: Played) -> Learned:
    """What a worker costs.

    Args:
        calls: Of a trace that keeps the devices busy now and then.
        played: What came of it.
        lonely: What came of jobs that met an idle worker.

    Raises:
        SystemExit: There were too few batches.
    """
    batches = collect_batches(calls, played.heard)
    model = CostModel(BELIEVED)
    for each in batches:
        model.ran(each.units, each.items, 1, each.forward_ms)
    costs = model.costs
    if costs is None:
        raise SystemExit(f"{len(batches)} batches are too few to learn from; give more --seconds")
    # Relative errors favour the batches that were quick. The mean decides how busy a device is.
    took_ms = sum(each.forward_ms for each in batches)
    believed_ms = sum(costs.expected_ms(each.units, each.items) for each in batches)
    costs = Costs(*(cost * took_ms / believed_ms for cost in costs))
    ratios = [each.forward_ms / costs.expected_ms(each.units, each.items) for each in batches]
    alone_ms = statistics.median(
        each.latency_s * 1e3 - each.info["forward_ms"] for each in lonely.heard
    )
    found_ms = list(gaps_ms(batches))
    gap_ms = statistics.median(found_ms) if len(found_ms) >= MIN_GAPS else alone_ms
    has_tokens = any(each.tokens for each in batches)
    return Learned(
        pass_ms=costs.pass_ms,
        item_ms=costs.item_ms if has_tokens else costs.token_ms,
        token_ms=costs.token_ms if has_tokens else 0.0,
        noise=statistics.pstdev(map(math.log, ratios)),
        prepare_ms=gap_ms,
        overhead_ms=max(0.0, alone_ms - gap_ms),
    )


def collect_batches(calls: Sequence[Call], heard: Sequence[Heard]) -> list[Ran]:
    """The batches of a trace, as they ended."""
    jobs: dict[str, list[tuple[Call, Heard]]] = {}
    for call, each in zip(calls, heard, strict=True):
        jobs.setdefault(each.info["id"], []).append((call, each))
    return sorted(map(_ran, jobs.values()), key=lambda each: each.heard_s)


def _ran(jobs: Sequence[tuple[Call, Heard]]) -> Ran:
    info = jobs[0][1].info
    return Ran(
        device=info["device"],
        heard_s=min(call.due_s + each.latency_s for call, each in jobs),
        items=info["size"],
        tokens=sum(call.tokens for call, _ in jobs),
        forward_ms=info["forward_ms"],
        queued_ms=info["prepare_ms"] + info["queued_ms"],
        waited_ms=max(each.info["waited_ms"] for _, each in jobs),
    )


def gaps_ms(batches: Iterable[Ran]) -> Iterator[float]:
    """How long a device stood still between two batches although the second one was wanted.

    Only where a job of the second one was in the worker when the first one ended, and it was not
    sent to the device before.
    """
    last: dict[str, Ran] = {}
    for each in batches:
        before = last.get(each.device)
        last[each.device] = each
        if before is not None:
            gap_ms = (each.heard_s - before.heard_s) * 1e3 - each.forward_ms
            if each.queued_ms < gap_ms <= each.waited_ms:
                yield gap_ms
