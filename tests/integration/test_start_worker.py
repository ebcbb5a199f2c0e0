"""Celery's `start_worker`: the worker and its devices are in the test's own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import flush
from support.harness import PYTHONPATH
from support.own_process import run_alone
from support.patience import TIMEOUT_S, patient

#: Runs in a process of its own: a worker leaves its marks on the one that it was in.
TEST = f"""
import logging, os, sys, threading, time
from contextlib import suppress
from celery import Celery
from celery.contrib.testing.worker import start_worker
from batchery import BatchTask, Failed, Model, install, register

def make():
    # No module has this app, nor its tasks.
    app = install(Celery("shop", broker=sys.argv[1], backend=sys.argv[1]))
    prices = {{"tea": 1}}

    @app.task(base=BatchTask, shared=False)
    def price(names):
        time.sleep(0.01)  # Meanwhile jobs come, one by one, for the next batch.
        return [
            {{"price": prices[name], "pid": os.getpid(), "batch": len(names)}}
            if name in prices else Failed(name)
            for name in names
        ]

    @app.task(base=BatchTask, shared=False)
    async def slow(items):
        return [item * 2 for item in items]

    @app.task(base=BatchTask, shared=False, time_limit={int(patient(2))})
    def stuck(items):
        if items == ["stuck"]:
            ended.wait()
        return items

    return app, prices, price, slow, stuck

ended = threading.Event()
app, prices, price, slow, stuck = make()
for _ in range(2):
    options = {{"perform_ping_check": False, "shutdown_timeout": {TIMEOUT_S}}}
    with start_worker(app, pool=sys.argv[2], **options) as worker:
        prices["coffee"] = 2  # as a fixture would
        jobs = price.submit_many(["tea", "coffee"] * 50)
        answers = jobs.get(timeout={TIMEOUT_S}, disable_sync_subtasks=False)
        assert [each["price"] for each in answers] == [1, 2] * 50
        assert {{each["pid"] for each in answers}} == {{os.getpid()}}
        assert max(each["batch"] for each in answers) > 1
        error = price.delay("milk").get(timeout={TIMEOUT_S}, propagate=False)
        assert type(error).__name__ == "ItemFailed", error
        assert slow.delay("ab").get(timeout={TIMEOUT_S}) == "abab"
        assert "batchery-device" in {{each.name for each in threading.enumerate()}}
        if sys.argv[3] == "stuck":
            ended.clear()
            error = stuck.delay("stuck").get(timeout={TIMEOUT_S}, propagate=False)
            assert type(error).__name__ == "TimeLimitExceeded", error
            assert stuck.delay("free").get(timeout={TIMEOUT_S}) == "free"
            ended.set()
    assert "batchery-device" not in {{each.name for each in threading.enumerate()}}
print("done")
"""


@pytest.mark.parametrize(
    ("pool", "case"), [("solo", ""), ("threads", ""), ("prefork", ""), ("threads", "stuck")]
)
def test_a_worker_in_a_test_runs_batches_in_the_process_of_the_test(
    redis_url: str, tmp_path: Path, pool: str, case: str
) -> None:
    flush(redis_url)
    run_alone(TEST, redis_url, pool, case, folder=tmp_path)


#: A test of a function, in a directory with models.
BESIDE_MODELS = f"""
from celery import Celery
from celery.contrib.testing.worker import start_worker
from batchery import BatchTask, Model, install, register

loaded = []

class Heavy(Model):
    def load(self, device):
        loaded.append(device)

    def forward(self, batch, *_, **__):
        return list(batch)

app = install(Celery("shop", broker="memory://", backend="cache+memory://"))
heavy = register(app, "heavy", Heavy)

@app.task(base=BatchTask, shared=False)
def shout(texts):
    return [text.upper() for text in texts]

options = dict(perform_ping_check=False, shutdown_timeout={TIMEOUT_S})
with start_worker(app, pool="solo", **options):
    answers = dict(timeout={TIMEOUT_S}, disable_sync_subtasks=False)
    assert shout.delay("a").get(**answers) == "A"
    assert loaded == []
    assert heavy.delay("b").get(**answers) == "b"
    assert loaded == ["cpu"]
print("done")
"""


def test_a_worker_in_a_test_loads_a_model_at_its_first_job(tmp_path: Path) -> None:
    model = 'kind = "embedding"\nmodel = "./nowhere"'
    (tmp_path / "batchery.toml").write_text(f"[models.embed]\n{model}\n")
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_MODELS],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(240),
    )
    assert done.stdout == "done\n", done.stdout + done.stderr
