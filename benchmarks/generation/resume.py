"""kill -9 of device and worker, at random, while many jobs generate and are streamed.

First all texts are written without a kill. Then again, in several rounds, each with a kill of the
device and one of the worker. Every stream must give its text once, whole, and every job must end;
what was computed more than once is counted.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchery_producer import AsyncClient
from benchmarks.generation.ledger import Counts, read_counts
from benchmarks.generation.served import Served
from benchmarks.generation.throughput import FIRST, settings
from benchmarks.generation.workload import Text, draw_texts
from benchmarks.rows import print_table

#: The task.
COUNTED = "counted"

#: When the two kills of a round are: once such a part of all tokens has been read.
KILLED_AT = (0.05, 0.85)

#: Pause between two looks at that, in seconds.
LOOK_S = 0.02

#: How long a round may take, in seconds: a worker starts, a lease runs out, texts go on.
ROUND_S = 600.0


@dataclass(frozen=True, slots=True)
class Read:
    """What the reader of one job has got."""

    text: str
    tokens: Sequence[int]
    #: The stored result; None if the job failed or has none.
    result: Mapping[str, Any] | None
    error: str = ""


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all rounds; returns a row for each, and verdicts."""
    texts = draw_texts(options.jobs, options.longest, seed="resume")
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        ledger = Path(temporary)
        counted = {"settings": dict(settings(folder, options)), "ledger": str(ledger)}
        with Served({}, options.device, {"counted": counted}) as served:
            served.wait_ready(COUNTED, *FIRST)
            began_s = time.perf_counter()
            plain = asyncio.run(Reading(served, texts).run((), draw))
            usual_s = time.perf_counter() - began_s
            print(f"{len(texts)} streams without a kill: {usual_s:.1f} s", flush=True)
            rows = []
            for number in range(options.kill_rounds):
                kills = sorted(draw.uniform(*KILLED_AT) for _ in range(2))
                before, began_s = read_counts(ledger), time.perf_counter()
                read = asyncio.run(Reading(served, texts).run(kills, draw))
                seconds = time.perf_counter() - began_s
                rows.append(row_for(plain, read, before, read_counts(ledger)))
                rows[-1] |= {"killed_at": [round(each, 2) for each in kills]}
                rows[-1] |= {"seconds": round(seconds, 1)}
                print(f"round {number + 1} of {options.kill_rounds}: {rows[-1]}", flush=True)
    total = {name: sum(row[name] for row in rows) for name in FAULTS + COSTS}
    return {
        "jobs": len(texts),
        "tokens": sum(text.max_new_tokens for text in texts),
        "slots": options.slots,
        "seconds_without_kill": round(usual_s, 1),
        "rows": rows,
        "total": total,
        "verdicts": verdicts(len(texts) * len(rows), total),
    }


class Reading:
    """All texts of a round, streamed at once; used by one event loop."""

    def __init__(self, served: Served, texts: Sequence[Text]) -> None:
        self._served = served
        self._texts = texts
        #: Read so far, and of all texts.
        self._tokens = 0
        self._all_tokens = sum(text.max_new_tokens for text in texts)

    async def run(self, kills: Sequence[float], draw: random.Random) -> Sequence[Read]:
        """Reads all texts, while device and worker are killed after these parts of the tokens."""
        async with AsyncClient(self._served.url) as client, asyncio.timeout(ROUND_S):
            killing = asyncio.create_task(self._kill(kills, draw))
            read = await asyncio.gather(*(self._read(client, text) for text in self._texts))
            await killing
        return read

    async def _kill(self, kills: Sequence[float], draw: random.Random) -> None:
        """Kills the device once and the worker once, in any order; starts another worker."""
        targets = ["device", "worker"]
        draw.shuffle(targets)
        for part, target in zip(kills, targets, strict=False):
            while self._tokens < part * self._all_tokens:
                await asyncio.sleep(LOOK_S)
            if target == "worker":
                await asyncio.to_thread(self._served.kill_worker)
            else:
                self._served.kill_device()

    async def _read(self, client: AsyncClient, text: Text) -> Read:
        """Streams one text to its end."""
        parts, tokens = [], []
        stream = client.task(COUNTED).stream(text.prompt, **text.keywords)
        try:
            async for piece in stream:
                parts.append(piece["text"])
                tokens += piece["tokens"]
                self._tokens += len(piece["tokens"])
            result: Mapping[str, Any] = stream.result
        except Exception as error:  # noqa: BLE001 - whatever the reason, a failure is a finding
            return Read("".join(parts), tokens, None, f"{type(error).__name__}: {error}")
        return Read("".join(parts), tokens, result)


#: What must not be, and what it costs; both are summed up over all rounds.
FAULTS = ("failed", "gaps", "repeats", "other_texts")
COSTS = ("resumes", "recomputed_tokens", "fed_again_tokens")


def row_for(
    plain: Sequence[Read], read: Sequence[Read], before: Counts, after: Counts
) -> dict[str, Any]:
    """What one round has shown."""
    ended = [each for each in read if each.result is not None]
    generated = after.generated - before.generated
    return {
        "failed": len(read) - len(ended),
        "gaps": sum(is_short(each) for each in ended),
        "repeats": sum(is_long(each) for each in ended),
        "other_texts": sum(
            one.text != two.text for one, two in zip(plain, read, strict=True) if two.result
        ),
        "resumes": after.resumes - before.resumes,
        "recomputed_tokens": generated - sum(len(each.tokens) for each in read),
        "fed_again_tokens": after.fed_again - before.fed_again,
        "errors": sorted({each.error for each in read if each.error})[:3],
    }


def is_short(read: Read) -> bool:
    """Whether the stream had less than the result."""
    assert read.result is not None
    return len(read.tokens) < read.result["tokens_out"] or (
        read.text != read.result["text"] and not is_long(read)
    )


def is_long(read: Read) -> bool:
    """Whether the stream had more than the result."""
    assert read.result is not None
    return len(read.tokens) > int(read.result["tokens_out"])


def verdicts(jobs: int, total: Mapping[str, int]) -> list[dict[str, Any]]:
    """What is claimed, whether it holds, and what was found."""
    return [
        {
            "claim": "every job ends with its result",
            "holds": not total["failed"],
            "found": f"{total['failed']} of {jobs:,} did not",
        },
        {
            "claim": "no stream has a gap or a repeat",
            "holds": not total["gaps"] and not total["repeats"],
            "found": f"{total['gaps']} gaps, {total['repeats']} repeats",
        },
        {
            "claim": "the texts are those that are written without a kill",
            "holds": not total["other_texts"],
            "found": f"{total['other_texts']} of {jobs:,} are others",
        },
    ]


def show(report: Mapping[str, Any]) -> None:
    """Prints a table."""
    heads = ("rounds", "jobs", "failed", "gaps", "repeats", "other texts", "resumed")
    total, rounds = report["total"], len(report["rows"])
    of_tokens = max(rounds * report["tokens"], 1)
    cells = (
        str(rounds),
        f"{rounds * report['jobs']:,}",
        *(f"{total[name]:,}" for name in FAULTS),
        f"{total['resumes']:,}",
        f"{total['recomputed_tokens']:,} tokens ({total['recomputed_tokens'] / of_tokens:.2%})",
        f"{total['fed_again_tokens']:,} tokens ({total['fed_again_tokens'] / of_tokens:.2%})",
    )
    print_table([*heads, "computed twice", "fed again, without prompts"], [cells])
