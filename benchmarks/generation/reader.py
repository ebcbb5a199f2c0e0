"""Reads many streams at once, in a process that may be killed: `URL LOG STREAMS PIECES [--follow]`.

Each piece becomes a line of the log: its job, its id in the stream, itself, when it was read. With
`--follow` it goes on where the log ends. At the end it prints its processor time, without imports.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any, TextIO

from batchery_producer import AsyncClient
from benchmarks.generation.streams import METRONOME, read_log


async def read(stream: Any, log: TextIO) -> None:
    """Reads one stream to its end."""
    pieces: AsyncIterable[tuple[int, float]] = stream
    async for number, made_s in pieces:
        read_s = time.perf_counter()
        log.write(json.dumps([stream.id, stream.last_id, number, made_s, read_s]) + "\n")


async def read_all(url: str, log: Path, streams: int, pieces: int, *, follow: bool) -> None:
    """Begins streams, or goes on with those of the log, and reads all of them."""
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
            await asyncio.gather(*(read(each, lines) for each in found))


def main() -> None:
    """Entry point."""
    url, log, streams, pieces, *rest = sys.argv[1:]
    follow, used_s = rest == ["--follow"], time.process_time()
    asyncio.run(read_all(url, Path(log), int(streams), int(pieces), follow=follow))
    print(json.dumps({"cpu_s": time.process_time() - used_s}))


if __name__ == "__main__":
    main()
