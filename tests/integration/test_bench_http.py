"""The benchmarks of the gateway work; what they measure is not a matter for tests."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.http.load import Load
from support.bench_command import bench
from support.patience import patient

#: Of a server that is asked, closes a connection, and refuses: in turn.
ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",
    b"",
)


def load(answers: tuple[bytes, ...], connections: int) -> dict[str, object]:
    """The figures of connections to a server, each of which it gives these answers in turn."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
        writer.close()

    async def scene() -> dict[str, object]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            request = b"GET / HTTP/1.1\r\n\r\n"
            return await Load("127.0.0.1", port, [request]).run(connections, seconds=patient(30))

    return asyncio.run(asyncio.wait_for(scene(), patient(20)))


def test_what_a_server_refuses_or_cuts_off_is_no_answer() -> None:
    figures = load(ANSWERS, connections=3)
    assert (figures["requests"], figures["refused"], figures["lost"]) == (3, 3, 3)
    assert figures["statuses"] == {200: 3, 503: 3}


def test_a_server_that_answers_nobody_is_no_figure() -> None:
    with pytest.raises(ConnectionError, match="none of 2 connections had an answer"):
        load((b"",), connections=2)


def test_the_http_benchmark_measures_the_gateway(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    what = ["--models", "tiny", "--alone", "--connections", "1", "5", "--texts", "2"]
    answer = bench("http", *what, "--rounds=1", "--seconds=0.3", f"--write={target}")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert str(tmp_path) not in target.read_text()
    assert [row["connections"] for row in report["rows"]] == [1, 5]
    assert report["tokens_per_text"]["longest"] <= 128
    for row in report["rows"]:
        assert row["wrong"] == 0
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["requests_per_s"] > 0
        assert set(row["cpu_us_per_request"]) == {"gateway", "worker", "device", "redis"}


def test_callers_are_served_under_attack(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    few = ["--connections=80", "--seconds=6", f"--write={target}"]
    answer = bench("http.attack", *few)
    assert answer.returncode == 0, answer.stderr
    report = json.loads(target.read_text())
    assert set(report["opened"]) >= {"idle", "slow_head", "slow_body", "garbage", "reset", "deaf"}
    for phase in report["phases"].values():
        assert set(phase["statuses"]) == {"200"}
        assert phase["lost"] == 0


def test_the_benchmark_of_spinning_threads_measures_a_count_beside_neighbours(
    tmp_path: Path,
) -> None:
    target = tmp_path / "figures.json"
    what = ["--model=tiny", "--spins", "1000", "--neighbours", "0", "1"]
    few = ["--connections=2", "--rounds=1", "--seconds=0.3", f"--write={target}"]
    answer = bench("http.spinning", *what, *few)
    assert answer.returncode == 0, answer.stderr
    rows = json.loads(target.read_text())["rows"]
    cases = [(row["neighbours"], row["spins"]) for row in rows]
    assert cases == [(0, "1000"), (1, "1000")]
    assert all(row["wrong"] == 0 < row["requests_per_s"] for row in rows)
