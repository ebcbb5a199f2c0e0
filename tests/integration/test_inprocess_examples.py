"""The examples of the batcher without a broker, run as their readers run them."""

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.harness import START_S, TESTS
from support.tiny_models import save_model

EXAMPLES = TESTS.parent / "examples" / "inprocess"


def run(name: str, *arguments: object) -> list[str]:
    """Runs an example; returns the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", name, *map(str, arguments)],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_pipeline_forms_batches_of_four_and_ends_gracefully() -> None:
    *batches, results = run("pipeline.py")
    assert results == f"results {[number**2 for number in range(20)]}"
    assert all(line.startswith("batch [") for line in batches)
    sizes = [line.count(",") + 1 for line in batches]
    assert sum(sizes) == 20
    assert max(sizes) == 4


def test_the_pipeline_sends_no_more_while_nobody_reads() -> None:
    example = runpy.run_path(str(EXAMPLES / "pipeline.py"))

    async def scene() -> int:
        tasks: Any = asyncio.Queue(example["MAX_AHEAD"])
        producing = asyncio.create_task(example["produce"](tasks))
        while not tasks.full() or tasks.qsize() > sum(task.done() for task in tasks._queue):
            await asyncio.sleep(0.01)
        assert not producing.done()
        return len(await example["consume"](tasks))

    assert asyncio.run(asyncio.wait_for(scene(), START_S)) == 20


def test_the_dynamic_batcher_serves_the_urgent_first_and_refuses_too_many() -> None:
    urgent, before, full, answers, stats = run("dynamic_batcher.py")
    assert (urgent, before) == ("Urgent Request", "True before the flood is over")
    assert full.startswith("full, try again in ")
    assert answers.startswith("480 answers;")
    assert stats.startswith("BatcherStats(items=481, ")


def test_the_proxy_answers_150_callers(tmp_path: Path) -> None:
    save_model(tmp_path, "bert", labels=("no", "yes"))
    lines = run("bert_proxy.py", tmp_path)
    assert [line.split(":")[0] for line in lines[:3]] == ["1 callers", "5 callers", "150 callers"]
    assert lines[2].endswith("150 answers")
    texts, batches = [int(word) for word in lines[3].split() if word.isdigit()]
    assert texts == 157
    assert batches < 20


def test_the_embedder_answers_in_every_way(minilm_path: Path) -> None:
    assert run("embedder.py", minilm_path)[:4] == [
        "(384,)",
        "1000 vectors",
        "38400 numbers",
        "150 vectors from threads",
    ]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_every_example_is_tested(name: str) -> None:
    assert f'"{name}"' in Path(__file__).read_text()
