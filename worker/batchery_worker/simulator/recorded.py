"""Recorded jobs, from a file of JSON lines."""

import json
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from batchery.errors import DatasetError
from batchery_worker.job import Lane
from batchery_worker.simulator.workload import TASK, Arrival

#: Fields of a line; all but the first may be left out.
FIELDS = ("time_s", "task", "class", "tenant", "items", "tokens", "deadline_s")

#: Maximum number of characters of a wrong value that an error shows.
MAX_SHOWN = 40


def read_trace(path: Path, classes: Collection[str]) -> Sequence[Arrival]:
    """Reads a whole trace.

    A line is one job: a JSON object with `time_s`, the seconds since any moment, and perhaps
    `task`, `class`, `tenant`, `items`, `tokens` and `deadline_s`, the seconds from its arrival.
    Lines may be in any order. The first job comes at 0, whatever its time is. Empty lines are
    skipped.

    Args:
        path: Of the file.
        classes: Names of the priority classes; the first is that of lines without one.

    Returns:
        The jobs, in the order of time.

    Raises:
        DatasetError: The file cannot be read, or a line is wrong; names file, line and problem.
    """
    #: Lanes are few, and jobs are many.
    lanes: dict[Lane, Lane] = {}
    jobs = [_arrival(line, f"{path}:{number}", classes, lanes) for number, line in _lines(path)]
    jobs.sort(key=attrgetter("time_s"))
    first_s = jobs[0].time_s if jobs else 0.0
    return [job._replace(time_s=job.time_s - first_s) for job in jobs]


def _arrival(line: str, place: str, classes: Collection[str], lanes: dict[Lane, Lane]) -> Arrival:
    row = _parse(line, place)
    time_s = _seconds(row, "time_s", place)
    if time_s is None:
        raise DatasetError(f"{place}: no time_s; give the seconds since any moment")
    usual = next(iter(classes))
    lane = Lane(_text(row, "class", usual, place), _text(row, "tenant", "", place))
    if lane.priority_class not in classes:
        raise DatasetError(
            f"{place}: no class {lane.priority_class!r}; there are {', '.join(classes)};"
            " others are those of the setting `classes`, as in the batchery.toml of this folder"
        )
    return Arrival(
        time_s,
        sys.intern(_text(row, "task", TASK, place)),
        lanes.setdefault(lane, lane),
        _count(row, "items", 1, place),
        _count(row, "tokens", 0, place),
        _seconds(row, "deadline_s", place),
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{path}:{number + 1}: is no text in UTF-8") from None


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{place}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{place}: {_shown(row)} is no JSON object; a job has fields")
    if unknown := sorted(set(row) - set(FIELDS)):
        raise DatasetError(f"{place}: no field {unknown[0]!r}; there are {', '.join(FIELDS)}")
    return row


def _seconds(row: dict[str, Any], field: str, place: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be a number of seconds")
    if not math.isfinite(value) or value < 0:
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be at least 0")
    return float(value)


def _count(row: dict[str, Any], field: str, default: int, place: str) -> int:
    value = row.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < default:
        expected = f"it must be a whole number of at least {default}"
        raise DatasetError(f"{place}: {field} is {_shown(value)}; {expected}")
    return value


def _text(row: dict[str, Any], field: str, default: str, place: str) -> str:
    value = row.get(field, default)
    if not isinstance(value, str):
        raise DatasetError(f"{place}: {field} is {_shown(value)}; it must be a text")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
