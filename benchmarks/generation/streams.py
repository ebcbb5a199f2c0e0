"""Many streams at once: every piece once and in order, how late, and what that costs.

The pieces are those of `metronome.py`, so that nothing but their way is measured: step, script,
Redis, reader. The readers are one process; in the last case it is killed, and another one goes on.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine.sample import cpu_by_name, cpu_since
from benchmarks.generation.served import Served
from benchmarks.rows import PERCENTS, percentiles_ms, print_table
from benchmarks.venvs import ROOT

#: The task.
METRONOME = "metronome"

#: What is claimed of the median on a quiet machine, in ms.
MEDIAN_MS = 5.0

#: How long readers may take, besides what the steps take, in seconds.
PATIENCE_S = 120.0

#: Pieces of a stream that are not counted: the streams begin one after the other.
WARM_PIECES = 5

#: When the reader is killed: a part of the time that all pieces take.
KILLED_AT = (0.3, 0.7)


def measure(_: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs each rate in turn, and a reader that is killed; returns rows and verdicts."""
    rows = []
    for step_ms in options.step_ms:
        print(f"{options.streams} streams, a piece each every {step_ms:g} ms", flush=True)
        rows.append(measure_rate(options.streams, step_ms, options.seconds, options.in_slots))
    print(f"{options.streams} streams, and their reader is killed", flush=True)
    killed = measure_kill(options.streams, max(options.step_ms), options.seconds)
    return {
        "streams": options.streams,
        "in_slots": options.in_slots,
        "seconds": options.seconds,
        "rows": rows,
        "killed_reader": killed,
        "verdicts": verdicts(rows, killed),
    }


@contextlib.contextmanager
def metronome(streams: int, step_ms: float) -> Iterator[Served]:
    """A worker whose model has a slot for each stream."""
    with Served({}, options={"metronome_slots": streams, "step_ms": step_ms}) as served:
        served.wait_ready(METRONOME, 1, {})
        yield served


def measure_rate(
    streams: int, step_ms: float, seconds: float, in_slots: int | None = None
) -> dict[str, Any]:
    """Reads all streams to their ends; how late each piece was, and what all that took.

    Args:
        streams: That are read at once.
        step_ms: Between two pieces.
        seconds: How long that takes, about.
        in_slots: How many of them have a slot at a time, while the others wait; None for all.
    """
    slots = in_slots or streams
    pieces = max(round(seconds * 1e3 / step_ms * slots / streams), WARM_PIECES + 1)
    with metronome(slots, step_ms) as served, tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "pieces")
        processes = served.processes()
        used = cpu_by_name(processes)
        reader = start_reader(served.url, log, streams, pieces)
        reader_s = await_reader(reader, pieces * step_ms / 1e3 * streams / slots + PATIENCE_S)
        cpu_s = cpu_since(used, processes) | {"reader": reader_s}
        logged = read_log(log)
    faults = count_faults(logged, streams, pieces)
    late_ms = [
        (read_s - made_s) * 1e3
        for lines in logged.values()
        for _, number, made_s, read_s in lines
        if number >= WARM_PIECES
    ]
    return {
        "step_ms": step_ms,
        "asked_per_s": round(slots * 1e3 / step_ms),
        "pieces_per_s": round(steady_rate(logged)),
        "pieces": sum(map(len, logged.values())),
        **percentiles_ms(late_ms),
        "longest_ms": round(max(late_ms), 2),
        "cpu_us_per_piece": {
            name: round(used_s / (streams * pieces) * 1e6, 1) for name, used_s in cpu_s.items()
        },
        **faults,
    }


def measure_kill(streams: int, step_ms: float, seconds: float) -> dict[str, Any]:
    """Kills the reader with signal 9 halfway; another one reads on from what was written down."""
    pieces = max(round(seconds * 1e3 / step_ms), WARM_PIECES + 1)
    with metronome(streams, step_ms) as served, tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "pieces")
        reader = start_reader(served.url, log, streams, pieces, "--each")
        while len(read_log(log)) < streams:
            check_runs(reader)
            time.sleep(0.5)
        time.sleep(random.uniform(*KILLED_AT) * pieces * step_ms / 1e3)
        reader.kill()
        reader.communicate()
        read_before = sum(map(len, read_log(log).values()))
        again = start_reader(served.url, log, streams, pieces, "--follow")
        await_reader(again, pieces * step_ms / 1e3 + PATIENCE_S)
        logged = read_log(log)
    return {
        "pieces": sum(map(len, logged.values())),
        "before_kill": read_before,
        **count_faults(logged, streams, pieces),
    }


def start_reader(
    url: str, log: Path, streams: int, pieces: int, *how: str
) -> "subprocess.Popen[str]":
    """Starts `reader.py`."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.generation.reader", url, str(log)]
    command += [str(streams), str(pieces), *how]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def await_reader(reader: "subprocess.Popen[str]", timeout_s: float) -> float:
    """Waits for its end; returns its processor time in seconds.

    Raises:
        SystemExit: It failed, or took too long.
    """
    try:
        said, _ = reader.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        reader.kill()
        raise SystemExit(f"streams: the reader was not done after {timeout_s:g} s") from None
    check_runs(reader)
    return float(json.loads(said)["cpu_s"])


def check_runs(reader: "subprocess.Popen[str]") -> None:
    """Raises SystemExit where it has failed."""
    if reader.poll():
        raise SystemExit(f"streams: the reader ended with exit code {reader.returncode}; see above")


#: Of each job, in the order in which they were written down: id of the entry, number of the piece,
#: when it was made, when it was read; both in seconds.
Logged = Mapping[str, Sequence[tuple[str, int, float, float]]]


def read_log(log: Path) -> Logged:
    """What readers have written down; a line that a kill has cut is none."""
    found: dict[str, list[tuple[str, int, float, float]]] = defaultdict(list)
    for line in log.read_text().split("\n")[:-1] if log.exists() else ():
        task_id, *rest = json.loads(line)
        found[task_id].append(tuple(rest))
    return found


def count_faults(logged: Logged, streams: int, pieces: int) -> dict[str, int]:
    """Pieces that did not come, came again, and came too early; all of them should be 0."""
    missing = (streams - len(logged)) * pieces
    repeated = disordered = 0
    for lines in logged.values():
        numbers = [number for _, number, _, _ in lines]
        missing += pieces - len(set(numbers))
        repeated += len(numbers) - len(set(numbers))
        disordered += sum(one > two for one, two in pairwise(numbers))
    return {"missing": missing, "repeated": repeated, "disordered": disordered}


def steady_rate(logged: Logged) -> float:
    """Pieces per second while all streams ran, or of the whole time where they took turns."""
    begins = [lines[0][3] for lines in logged.values()]
    ends = [lines[-1][3] for lines in logged.values()]
    begin_s, end_s = max(begins), min(ends)
    if end_s <= begin_s:
        begin_s, end_s = min(begins), max(ends)
    came = sum(begin_s <= line[3] <= end_s for lines in logged.values() for line in lines)
    return came / (end_s - begin_s) if end_s > begin_s else 0.0


def verdicts(rows: Sequence[Mapping[str, Any]], killed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is claimed, whether it holds, and what was found."""
    faults = ("missing", "repeated", "disordered")
    slow = rows[0]
    return [
        {
            "claim": "every piece comes once, in order",
            "holds": not any(row[each] for row in rows for each in faults),
            "found": ", ".join(f"{sum(row[each] for row in rows)} {each}" for each in faults),
        },
        {
            "claim": "a reader that is killed and started again misses nothing",
            "holds": not any(killed[each] for each in faults),
            "found": ", ".join(f"{killed[each]} {each}" for each in faults),
        },
        {
            "claim": f"half of the pieces reach their reader within {MEDIAN_MS:g} ms",
            "holds": slow["p50_ms"] <= MEDIAN_MS,
            "found": f"{slow['p50_ms']} ms at {slow['pieces_per_s']:,} pieces/s",
        },
    ]


def show(report: Mapping[str, Any]) -> None:
    """Prints a table."""
    heads = ("pieces/s asked", "pieces/s", *(f"p{percent}" for percent in PERCENTS), "longest")
    parts = list(report["rows"][0]["cpu_us_per_piece"])
    cells = [
        (
            f"{row['asked_per_s']:,}",
            f"{row['pieces_per_s']:,}",
            *(f"{row[f'p{percent}_ms']:,} ms" for percent in PERCENTS),
            f"{row['longest_ms']:,} ms",
            *(f"{row['cpu_us_per_piece'][part]:,} µs" for part in parts),
        )
        for row in report["rows"]
    ]
    print(f"{report['streams']} streams; processor time per piece, of each process")
    print_table([*heads, *parts], cells)
