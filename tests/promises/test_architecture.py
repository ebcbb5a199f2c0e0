"""What an import loads: nothing that takes seconds, where nobody computes.

What may import what is in pyproject.toml, where import-linter and ruff read it.
"""

import subprocess
import sys

import pytest

from support.patience import patient

#: They take seconds and hundreds of megabytes.
HEAVY = {"numpy", "torch", "transformers", "batchery_worker"}

# Without a broker: neither Celery nor Redis.
USE_BATCHED = """
from batchery import Failed, batched
assert batched(lambda items: items)(["a"]) == ["a"]
"""
BROKER = {"celery", "kombu", "redis", "pydantic", "batchery_producer"}


@pytest.mark.parametrize(
    ("script", "unwanted"),
    [
        (USE_BATCHED, HEAVY - {"batchery_worker"} | BROKER),
        ("from batchery import AsyncClient, Client, BatchTask, install", HEAVY),
    ],
    ids=["batched", "client"],
)
def test_what_computes_nothing_loads_nothing_heavy(script: str, unwanted: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\nimport sys\nprint(*{unwanted!r} & set(sys.modules))"],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
