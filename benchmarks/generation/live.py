"""Live chats beside a night of bulk, on the slots of one model.

Bulk always waits. Stretches of bulk alone and of bulk with live chats take turns on one worker.
A live chat has the highest priority and is streamed; they come by chance (Poisson). Tokens of bulk
are counted over the time that each text was computed, so that texts at the edge of a stretch count
in part.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from batchery_producer import AsyncClient
from benchmarks.generation.served import Served
from benchmarks.generation.throughput import CHAT, FIRST, settings
from benchmarks.generation.workload import Text, draw_texts
from benchmarks.rows import percentile, print_table

#: Priorities of Redis's transport.
LIVE, BULK = 0, 6

#: Callers of bulk for each slot: so many jobs are there or wait.
CALLERS_PER_SLOT = 4

#: Texts of bulk, again and again; and of live chats, which are short.
BULK_TEXTS, LIVE_TOKENS = 512, 32

#: Steps until the first token of a live chat, at most.
CLAIMED_STEPS = 2.0

#: Texts for each slot that end before a clock starts. The first ones all begin at once, and those
#: who called first have all slots.
WARM_TEXTS = 2


@dataclass(frozen=True, slots=True)
class Ended:
    """A text of bulk, when its computation began and ended, on the clock of this process."""

    begin_s: float
    end_s: float
    tokens: int

    def within(self, begin_s: float, end_s: float) -> float:
        """Tokens that were made in that time, if they came evenly."""
        overlap_s = min(self.end_s, end_s) - max(self.begin_s, begin_s)
        return self.tokens * max(0.0, overlap_s) / max(self.end_s - self.begin_s, 1e-9)


@dataclass(slots=True)
class Chat:
    """A live chat: when its pieces came, from its call on, in seconds."""

    came_s: list[float] = field(default_factory=list)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the stretches; returns a row and verdicts."""
    models = {CHAT: settings(folder, options)}
    with Served(models, options.device) as served:
        served.wait_ready(CHAT, *FIRST)
        print(f"live chats beside bulk, {options.stretches} stretches of each kind", flush=True)
        live = asyncio.run(measure_live(served.url, options))
    return {
        "slots": options.slots,
        "seconds": options.seconds,
        "live_per_s": options.live_per_s,
        "row": live,
        "verdicts": [
            {
                "claim": f"first token of a live chat within {CLAIMED_STEPS:g} steps, median",
                "holds": live["first_p50_steps"] <= CLAIMED_STEPS,
                "found": f"{live['first_p50_steps']} steps, p99 {live['first_p99_steps']}",
            }
        ],
    }


@contextlib.asynccontextmanager
async def feeding(client: AsyncClient, options: argparse.Namespace) -> AsyncIterator[list[Ended]]:
    """Keeps so many jobs of bulk waiting or running, and cancels them at the end of the block."""
    ended: list[Ended] = []
    texts = cycle(draw_texts(BULK_TEXTS, options.longest, "bulk"))
    call = client.task(CHAT, priority=BULK)

    async def caller() -> None:
        while True:
            text = next(texts)
            result = await call(text.prompt, **text.keywords)
            end_s, total_s = time.perf_counter(), result["timings"]["total_ms"] / 1e3
            ended.append(Ended(end_s - total_s, end_s, result["tokens_out"]))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller()) for _ in range(CALLERS_PER_SLOT * options.slots)]
        yield ended
        for task in tasks:
            task.cancel()


async def measure_live(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Stretches of bulk alone and with live chats, in turn."""
    draw, chats = random.Random(options.seed), list[Chat]()
    stretches: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    texts = cycle(draw_texts(BULK_TEXTS, seed="live"))
    async with AsyncClient(url) as client:
        alone = [await chat(client, next(texts)) for _ in range(5)]
        async with feeding(client, options) as ended:
            await until(lambda: len(ended) >= WARM_TEXTS * options.slots)
            for number in range(2 * options.stretches):
                is_live, begin_s = number % 2 == 1, time.perf_counter()
                if is_live:
                    chats += await run_chats(client, texts, draw, options)
                else:
                    await asyncio.sleep(options.seconds)
                stretches[is_live].append((begin_s, time.perf_counter()))
            # What is being computed is counted when it ends.
            last_s = time.perf_counter()
            while min(each.begin_s for each in ended[-options.slots :]) < last_s:
                await asyncio.sleep(0.2)
    return row_for(alone, chats, ended, stretches)


async def run_chats(
    client: AsyncClient, texts: Any, draw: random.Random, options: argparse.Namespace
) -> Sequence[Chat]:
    """Live chats for so long, at random times."""
    tasks, end_s = [], time.perf_counter() + options.seconds
    while (now_s := time.perf_counter()) < end_s:
        pause_s = draw.expovariate(options.live_per_s)
        await asyncio.sleep(min(pause_s, end_s - now_s))
        if now_s + pause_s < end_s:
            tasks.append(asyncio.create_task(chat(client, next(texts))))
    return await asyncio.gather(*tasks)


async def chat(client: AsyncClient, text: Text) -> Chat:
    """One live chat, read to its end."""
    made, began_s = Chat(), time.perf_counter()
    keywords = {"max_new_tokens": LIVE_TOKENS, "ignore_eos": True}
    async for _ in client.task(CHAT, priority=LIVE).stream(text.prompt, **keywords):
        made.came_s.append(time.perf_counter() - began_s)
    return made


def row_for(
    alone: Sequence[Chat],
    chats: Sequence[Chat],
    ended: Sequence[Ended],
    stretches: Mapping[bool, Sequence[tuple[float, float]]],
) -> dict[str, Any]:
    """First tokens of live chats, and tokens per second of bulk."""
    first_ms = [each.came_s[0] * 1e3 for each in chats]
    step_ms = statistics.median(
        (two - one) * 1e3 for each in chats for one, two in pairwise(each.came_s)
    )
    rates = {
        is_live: sum(text.within(*stretch) for text in ended for stretch in found)
        / sum(end_s - begin_s for begin_s, end_s in found)
        for is_live, found in stretches.items()
    }
    live_s = sum(end_s - begin_s for begin_s, end_s in stretches[True])
    live_per_s = sum(len(each.came_s) for each in chats) / live_s
    return {
        "chats": len(chats),
        "alone_first_ms": round(statistics.median(each.came_s[0] for each in alone) * 1e3, 1),
        "first_p50_ms": round(percentile(first_ms, 50), 1),
        "first_p99_ms": round(percentile(first_ms, 99), 1),
        "step_ms": round(step_ms, 1),
        "first_p50_steps": round(percentile(first_ms, 50) / step_ms, 2),
        "first_p99_steps": round(percentile(first_ms, 99) / step_ms, 2),
        "bulk_tokens_per_s": round(rates[False], 1),
        "bulk_with_live_tokens_per_s": round(rates[True], 1),
        "live_tokens_per_s": round(live_per_s, 1),
        "all_of_bulk_alone": round((rates[True] + live_per_s) / rates[False], 3),
    }


async def until(condition: Callable[[], bool]) -> None:
    """Waits until that is so."""
    while not condition():
        await asyncio.sleep(0.2)


def show(report: Mapping[str, Any]) -> None:
    """Prints a table."""
    row = report["row"]
    heads = ("live chats", "first token alone", "p50", "p99", "a step", "p50", "p99")
    cells = (
        f"{row['chats']:,}",
        *(f"{row[key]:,} ms" for key in ("alone_first_ms", "first_p50_ms", "first_p99_ms")),
        f"{row['step_ms']:,} ms",
        *(f"{row[key]:,} steps" for key in ("first_p50_steps", "first_p99_steps")),
        f"{row['bulk_tokens_per_s']:,} tokens/s",
        f"{row['bulk_with_live_tokens_per_s']:,}",
        f"{row['live_tokens_per_s']:,}",
    )
    print_table([*heads, "bulk alone", "with live", "live"], [cells])
