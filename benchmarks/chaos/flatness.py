"""Whether what a run holds on to grows while the load stays the same. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: How much larger the last quarter's median may be than the second's, as a part of that.
TOLERANCE = 0.05

#: And so many bytes more: what an allocator takes at a time.
SLACK_BYTES = 1 << 20

#: Figures that are bytes; all others are counts.
BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at everything."""

    #: Since the load began.
    at_s: float
    #: Name of a figure -> its value; for processes the median of those of a role.
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Growth:
    """A figure's median in the second and in the last quarter of a run."""

    figure: str
    early: float
    late: float
    is_flat: bool


def compare(samples: Sequence[Sample], is_judged: Callable[[str], bool]) -> list[Growth]:
    """Compares the quarters of a run, figure by figure; the first is the warm-up.

    A figure that a sample lacks was 0 then, if it is a count.

    Args:
        samples: In order of time; none if there are fewer than eight.
        is_judged: Whether a figure must be flat; the others are so by definition.
    """
    quarter = len(samples) // 4
    if quarter < 2:
        return []
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    names = sorted({name for sample in samples for name in sample.figures})
    found = []
    for name in names:
        early, late = (_middle(name, some) for some in (second, last))
        if early is not None and late is not None:
            is_flat = not is_judged(name) or late <= _bound(name, early)
            found.append(Growth(name, early, late, is_flat))
    return found


def _middle(name: str, samples: Sequence[Sample]) -> float | None:
    values = list(_values(name, samples))
    return median(values) if values else None


def _values(name: str, samples: Sequence[Sample]) -> Iterator[float]:
    for sample in samples:
        if name in sample.figures:
            yield sample.figures[name]
        elif name.endswith((" keys", " members")):
            yield 0.0


def _bound(name: str, early: float) -> float:
    # What comes at random scatters by the root of its number.
    slack = SLACK_BYTES if name.endswith(BYTES) else 2 + 2 * early**0.5
    return early * (1 + TOLERANCE) + slack
