"""Reads many streams at once, in a process of its own: `URL LOG STREAMS PIECES [--each|--follow]`.

Each piece becomes a line of the log: its job, its id in the stream, itself, when it was read. They
are written at the end, as the next pieces would wait for that; with `--each` at once, for a reader
that is killed. With `--follow` it goes on where the log ends. At the end it prints its processor
time, without imports.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterable, Callable
from pathlib import Path
from typing import Any

from batchery_producer import AsyncClient
from benchmarks.generation.streams import METRONOME, read_log

#: Job, id in the stream, number, when it was made, when it was read.
Line = tuple[Any, ...]


async def read(stream: Any, note: Callable[[Line], None]) -> None:
    """Reads one stream to its end."""
    pieces: AsyncIterable[tuple[int, float]] = stream
    async for number, made_s in pieces:
        note((stream.id, stream.last_id, number, made_s, time.perf_counter()))


async def read_all(url: str, log: Path, streams: int, pieces: int, how: str = "") -> float:
    """Begins streams, or goes on with those of the log, and reads all of them.

    Returns:
        What that took of the processor, in seconds.
    """
    follow, noted, used_s = how == "--follow", list[Line](), time.process_time()
    last = {task_id: lines[-1][0] for task_id, lines in read_log(log).items()} if follow else {}
    whole = log.read_text().rpartition("\n") if follow else ("", "", "")
    # A line that a kill has cut is none, and its piece is read again.
    log.write_text(whole[0] + whole[1])
    async with AsyncClient(url) as client:
        if follow:
            found = [client.follow(task_id, after=after) for task_id, after in last.items()]
        else:
            found = [client.task(METRONOME).stream(pieces) for _ in range(streams)]
        # By lines, so that what was read is on record before the next piece.
        with log.open("a", buffering=1, encoding="utf-8") as lines:

            def write(line: Line) -> None:
                lines.write(json.dumps(line) + "\n")

            await asyncio.gather(*(read(each, write if how else noted.append) for each in found))
    used_s = time.process_time() - used_s
    with log.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(each) + "\n" for each in noted)
    return used_s


def main() -> None:
    """Entry point."""
    url, log, streams, pieces, *how = sys.argv[1:]
    used_s = asyncio.run(read_all(url, Path(log), int(streams), int(pieces), *how))
    print(json.dumps({"cpu_s": used_s}))


if __name__ == "__main__":
    main()
