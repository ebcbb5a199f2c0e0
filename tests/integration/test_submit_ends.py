"""How a bulk run ends when it does not go well: signals, stall, restarts, refusals."""

import contextlib
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from support.bulk_runs import APP, QUEUE, Command, read_rows, write_rows
from support.harness import Worker, wait_for
from support.patience import patient


@pytest.fixture
def empty_queue(store: "redis.Redis") -> Iterator[str]:
    """A queue that nobody consumes; its jobs are gone after the test."""
    yield "nobody"
    store.delete("nobody")


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (mask,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_slow_input_holds_up_no_result_and_ctrl_c_while_it_waits_ends_it(
    tmp_path: Path, redis_url: str, worker: Worker
) -> None:
    output = tmp_path / "out.jsonl"
    command = Command(
        tmp_path, redis_url, "-", "-A", APP, "--task", f"{APP}.shout", "-o", str(output)
    )
    assert command.process.stdin is not None
    command.process.stdin.write(b'{"text": "one"}\n')
    command.process.stdin.flush()
    wait_for(lambda: output.exists() and output.stat().st_size > 0, "the first result")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(patient(30)) == 130
    _, _, stderr = command.end()
    assert "Fatal Python error" not in stderr
    assert "1 done" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_ends_it_cleanly_and_names_what_is_there(
    tmp_path: Path, redis_url: str, worker: Worker, number: int, store: "redis.Redis"
) -> None:
    rows: list[Any] = [{"text": {"answer": "failed", "why": "no good"}}]
    rows += [{"text": {"answer": "value", "value": number}} for number in range(100_000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = Command(
        tmp_path,
        redis_url,
        *["in.jsonl", "-A", APP, "--task", f"{APP}.moody", "-o", "out.parquet", "--json"],
        *["--window", "64"],
    )
    part, failures = tmp_path / "out.parquet.part", tmp_path / "out.errors.jsonl"
    wait_for(lambda: part.exists() and part.stat().st_size and failures.exists(), "first results")
    command.process.send_signal(number)
    code, stdout, stderr = command.end()
    summary = json.loads(stdout)
    assert (code, summary["ending"], summary["failed"]) == (130, "interrupted", 1)
    assert summary["in_flight"] <= 64
    assert len(read_rows(part)) == summary["succeeded"] < 100_000
    assert summary["submitted"] == summary["succeeded"] + 1 + summary["in_flight"]
    assert "; results in out.parquet.part\n" in stderr
    first = "in.jsonl, line 1: ItemFailed: no good"
    assert f"\nfailures in out.errors.jsonl; the first: {first}\n" in stderr
    assert "the same command with --resume goes on from here" in stderr
    wait_for(lambda: store.llen(QUEUE) == 0, "the jobs that were left to be run")


def test_a_second_ctrl_c_ends_it_at_once(
    tmp_path: Path, redis_url: str, empty_queue: str, worker: Worker
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 10)
    output = tmp_path / "out.jsonl"
    command = Command(
        tmp_path,
        redis_url,
        *[str(source), "--redis", redis_url, "--task", "x", "--queue", empty_queue],
        *["-o", str(output)],
    )
    wait_for(output.exists, "the run to begin")
    command.process.send_signal(signal.SIGINT)
    with contextlib.suppress(ProcessLookupError):
        command.process.send_signal(signal.SIGINT)
    assert command.end()[0] == 130


def test_without_a_worker_it_gives_up_and_says_why(
    tmp_path: Path, redis_url: str, empty_queue: str, worker: Worker, store: "redis.Redis"
) -> None:
    source = write_rows(tmp_path / "in.jsonl", 10)
    arguments = [str(source), "--redis", redis_url, "--task", empty_queue, "--queue", empty_queue]
    arguments += ["-o", "out.jsonl", "--overwrite", "--timeout", "0.5", "--window", "4"]

    def give_up() -> str:
        """What it says; nothing if the worker did not answer in time."""
        store.delete(empty_queue)
        code, _, said = Command(tmp_path, redis_url, *arguments).end()
        assert code == 3
        return said if worker.name in said else ""

    stderr = wait_for(give_up, "the worker answers in time", patient(60))
    assert "no result for 0.5 s: 4 waiting in queue 'nobody'" in stderr
    assert f"{worker.name} answers, but consumes another queue" in stderr
    assert "4 jobs still in flight" in stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_wrong_field_is_one_line_and_the_right_one_works_at_once(
    tmp_path: Path, redis_url: str, worker: Worker
) -> None:
    write_rows(tmp_path / "in.jsonl", 300)
    command = ["in.jsonl", "-A", APP, "--task", f"{APP}.shout", "-o", "out.jsonl"]
    code, _, stderr = Command(tmp_path, redis_url, *command, "--field", "texts").end()
    assert (code, stderr.count("\n")) == (2, 1)
    assert (
        "no field 'texts', the nearest is text; fields: 'id', 'text'; none of the first" in stderr
    )
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]
    code, _, stderr = Command(tmp_path, redis_url, *command).end()
    assert code == 0
    said, done = stderr.splitlines()
    assert said.endswith(": the item is 'text', the id is 'id'")
    assert done.endswith("300 succeeded, 0 failed; results in out.jsonl")


def test_ctrl_c_before_the_first_row_makes_nothing(
    tmp_path: Path, redis_url: str, worker: Worker
) -> None:
    command = Command(
        tmp_path, redis_url, "-", "-A", APP, "--task", f"{APP}.shout", "-o", "out.jsonl"
    )
    wait_for(lambda: catches(command.process.pid, signal.SIGTERM), "it handles signals")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(patient(30)) == 130
    assert not list(tmp_path.iterdir())
    assert "results in" not in command.end()[2]
