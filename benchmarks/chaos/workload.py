"""What is computed in a run, and what must come out. Pure: the same for the same plan."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

from benchmarks.chaos.plan import Plan

#: Values stay below this prime, so that they are the same in JSON as in Python.
MODULUS = 1_000_003

#: Steps of a chain, parts of a chord, items of a multi-item job.
STEPS = 3

Item = dict[str, int]


class Kind(StrEnum):
    """How a job is sent."""

    PLAIN = "plain"
    LATER = "plain, with a countdown"
    ORDINARY = "ordinary"
    MULTI_ITEM = "multi-item"
    CHAIN = "chain"
    MIXED_CHAIN = "chain of both kinds"
    CHORD = "chord"


#: Of 100 jobs, so many are of each kind.
SHARES = {
    Kind.PLAIN: 54,
    Kind.LATER: 6,
    Kind.ORDINARY: 16,
    Kind.MULTI_ITEM: 8,
    Kind.CHAIN: 6,
    Kind.MIXED_CHAIN: 6,
    Kind.CHORD: 4,
}


@dataclass(frozen=True, slots=True)
class Order:
    """One job to be sent, and its result."""

    number: int
    kind: Kind

    @property
    def items(self) -> list[Item]:
        """What it starts with; a chain and a plain job with the first alone."""
        return [{"job": self.number, "value": self.number * STEPS + n} for n in range(STEPS)]

    @property
    def expected(self) -> Any:
        """The result of its last task."""
        first = self.items[0]
        match self.kind:
            case Kind.PLAIN | Kind.LATER | Kind.ORDINARY:
                return advance(first)
            case Kind.MULTI_ITEM:
                return [{"ok": advance(item)} for item in self.items]
            case Kind.CHAIN | Kind.MIXED_CHAIN:
                for _ in range(STEPS):
                    first = advance(first)
                return first
            case Kind.CHORD:
                return total([advance(item) for item in self.items])


def orders(plan: Plan, after: int = 0) -> Iterator[Order]:
    """All jobs of a run, in order.

    Args:
        plan: The plan of the run.
        after: How many jobs of the calibration came before them.
    """
    random = Random(plan.seed)
    mixed = (Kind.ORDINARY, Kind.MIXED_CHAIN)
    shares = [share * (plan.ordinary if kind in mixed else 1.0) for kind, share in SHARES.items()]
    kinds = random.choices(list(SHARES), shares, k=after + plan.jobs)
    return (Order(number, kinds[number]) for number in range(after, len(kinds)))


def advance(item: Item) -> Item:
    """What the batch task does to one item: no two in a row give the same."""
    return {"job": item["job"], "value": (item["value"] * 31 + 7) % MODULUS}


def total(items: list[Item]) -> Item:
    """What the body of a chord does to the results of its parts."""
    return {"job": items[0]["job"], "value": sum(item["value"] for item in items) % MODULUS}
