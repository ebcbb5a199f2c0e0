"""One dataset through three kills: of the producer, of the worker, and of Redis."""

from collections import Counter
from pathlib import Path

from conftest import StartWorker
from support.bulk_runs import Command, read_rows, write_rows
from support.harness import wait_for
from support.own_redis import OwnRedis

APP = "apps.tally"
COUNT = 6000

#: Part of the rows that may be computed again, as Batchery promises.
MAX_REPEATED_SHARE = 0.02


def test_every_row_is_there_once_and_few_are_computed_again(
    tmp_path: Path, start_worker: StartWorker, own_redis: OwnRedis
) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", COUNT), tmp_path / "out.jsonl"
    trace = tmp_path / "trace"
    trace.touch()
    arguments = [
        *[str(source), "-A", APP, "--task", f"{APP}.tally"],
        *["-o", str(output), "--option", f'path="{trace}"', "--option", "pause_s=0.02"],
        *["--window", "512", "--resume"],
    ]
    redis = {"CELERY_BROKER_URL": own_redis.url, "CELERY_RESULT_BACKEND": own_redis.url}

    def reached(share: float) -> bool:
        return trace.read_bytes().count(b"\n") > share * COUNT

    worker = start_worker(APP, env=redis)
    first = Command(tmp_path, own_redis.url, *arguments)
    wait_for(lambda: reached(0.3), "30 %")
    first.process.kill()
    first.end()
    second = Command(tmp_path, own_redis.url, *arguments)
    wait_for(lambda: reached(0.6), "60 %")
    worker.kill()
    start_worker(APP, env=redis)
    wait_for(lambda: reached(0.8), "80 %")
    own_redis.kill()
    own_redis.start()
    code, _, stderr = second.end()
    assert code == 0, stderr
    rows = read_rows(output)
    assert sorted(row["row"] for row in rows) == list(range(1, COUNT + 1))
    assert all(row["result"] == f"TEXT {row['row'] - 1}" for row in rows)
    computed = Counter(trace.read_text().splitlines())
    assert sum(computed.values()) - COUNT < MAX_REPEATED_SHARE * COUNT
