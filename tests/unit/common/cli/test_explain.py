"""One job explained: by its result, or by what the workers say."""

import json

import pytest

from batchery.cli.explain import from_result, from_workers

BATCH = {
    "id": "b7",
    "size": 37,
    "waited_ms": 12.3,
    "padding": 0.042,
    "forward_ms": 9.04,
    "device": "cuda:0",
}


def test_a_success_is_one_line() -> None:
    found = from_result("id", {"status": "SUCCESS", "result": [1.0], "batch": BATCH})
    assert found.line == (
        "SUCCESS: waited 12.3 ms, id b7, size 37, padding 4.2 %, forward 9.0 ms, device cuda:0"
    )
    assert found.exit_code == 0
    assert json.loads(json.dumps(found.report()))["batch"] == BATCH


def test_a_failure_says_why_in_one_line() -> None:
    error = ValueError("first line\nsecond line")
    found = from_result("id", {"status": "FAILURE", "result": error, "batch": BATCH})
    assert found.line.endswith("device cuda:0; ValueError: first line second line")
    assert found.exit_code == 1


def test_an_error_with_an_escape_cannot_move_the_cursor() -> None:
    found = from_result("id", {"status": "FAILURE", "result": ValueError("no \x1b[2Jitem")})
    assert found.line.endswith("; ValueError: no \\x1b[2Jitem")
    assert found.report()["error"] == "ValueError: no \x1b[2Jitem"


@pytest.mark.parametrize(
    ("state", "exit_code"), [("REVOKED", 1), ("RETRY", 3), ("STARTED", 3), ("OF_THE_USER", 3)]
)
def test_other_states_have_their_exit_code(state: str, exit_code: int) -> None:
    found = from_result("id", {"status": state, "result": None})
    assert (found.state, found.exit_code) == (state, exit_code)
    assert "no facts of a batch" in found.line


@pytest.mark.parametrize(
    ("where", "state", "text"),
    [
        ("active", "ACTIVE", "runs on worker two"),
        ("reserved", "WAITING", "waits in worker two"),
        ("scheduled", "SCHEDULED", "waits for its time in worker two"),
        ("ready", "ENDED", "has ended in worker two"),
    ],
)
def test_job_without_a_result_has_the_status_from_its_worker(
    where: str, state: str, text: str
) -> None:
    found = from_workers("id", {"one": {}, "two": {"id": [where, {}]}})
    assert found.line == f"{state}: {text}"
    assert (found.exit_code, found.worker) == (3, "two")


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({}, "no worker answers"),
        ({"one": {}}, "worker one does not have it"),
        ({"one": {}, "two": {}}, "none of 2 workers has it"),
        ({"one": {"error": "unknown command"}}, "worker one does not have it"),
    ],
)
def test_job_that_no_worker_has_is_unknown(answers: dict[str, dict[str, str]], text: str) -> None:
    found = from_workers("id", answers)
    assert (
        found.line == f"UNKNOWN: no result, and {text}: still in its queue, expired, or never sent"
    )
    assert found.exit_code == 4
