"""Draws the pictures of docs/scheduling.md, by the worker's scheduler in virtual time.

The same scheduler gives the same bytes each time. All of them take half a minute.

    python -m benchmarks.scheduling.plots
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scheduling.plots import (
    deadlines,
    latency_target,
    live_beside_bulk,
    shares,
    small_calls,
    strict_order,
)
from benchmarks.scheduling.plots.canvas import save
from benchmarks.scheduling.plots.runs import Figures

#: Where the pictures of the documentation are.
TARGET = Path("docs/scheduling")


class Plot(NamedTuple):
    """One picture."""

    #: Makes its figures; its argument scales how much is simulated.
    measured: Callable[[float], Figures]
    #: Draws them on a figure of matplotlib, and returns the title.
    draw: Callable[[Any, Figures], str]


#: Name of the file -> its picture.
PLOTS: Mapping[str, Plot] = {
    "shares": Plot(shares.measured, shares.draw),
    "live_beside_bulk": Plot(live_beside_bulk.measured, live_beside_bulk.draw),
    "deadlines": Plot(deadlines.measured, deadlines.draw),
    "latency_target": Plot(latency_target.measured, latency_target.draw),
    "small_calls": Plot(small_calls.measured, small_calls.draw),
    "strict_order": Plot(strict_order.measured, strict_order.draw),
}


def main() -> None:
    """Simulates and draws."""
    options = parse()
    options.target.mkdir(parents=True, exist_ok=True)
    for name in options.names or PLOTS:
        path = options.target / f"{name}.{options.format}"
        save(path, PLOTS[name].draw, PLOTS[name].measured(options.scale))
        print(path)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PLOTS)}")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the pictures")
    parser.add_argument("--scale", type=float, default=1.0, help="of how much is simulated")
    parser.add_argument("--format", choices=["svg", "png"], default="svg")
    options = parser.parse_args()
    for name in options.names:
        if name not in PLOTS:
            parser.error(f"no picture {name!r}; there are {', '.join(PLOTS)}")
    return options


if __name__ == "__main__":
    main()
