import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchery.cli.main import main
from batchery_producer import Ending, Snapshot, SubmitOptions, Summary
from batchery_producer.cli.submit import as_dict, describe, figures
from batchery_producer.files.options import duration


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["submit", *arguments])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--option", "novalue"], "expected KEY=VALUE"),
        (["--window", "0"], "not in the range"),
        (["--timeout", "0"], "not in the range"),
        (["--expires", "inf"], "not in the range"),
        (["--priority", "10"], "not in the range"),
        (["--json", "-o", "-"], "both want stdout"),
        (["-A", "shop", "--redis", "redis://"], "--redis is for the default app"),
    ],
)
def test_command_with_invalid_arguments_is_refused(arguments: list[str], why: str) -> None:
    result = invoke("in.jsonl", "--task", "embed", "-o", "out.jsonl", *arguments)
    assert result.exit_code == 2
    assert why in result.output


def test_command_with_missing_input_prints_one_line_and_exits_with_2(tmp_path: Path) -> None:
    result = invoke(str(tmp_path / "none.jsonl"), "--task", "embed", "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "none.jsonl: cannot be read: No such file" in result.output


def test_help_names_every_exit_code() -> None:
    text = invoke("--help").output
    assert all(f"\n    {each.value} " in text for each in Ending)


def test_summary_is_json_and_text() -> None:
    names = ("out.jsonl", "out.errors.jsonl", "in.csv, line 3: ItemFailed: no good")
    summary = Summary(Ending.GAVE_UP, 10, 6, 2, 2, 4.0, "embed", "no result for 5 s", 0, *names)
    assert json.loads(json.dumps(as_dict(summary))) == {
        "ending": "gave_up",
        "submitted": 10,
        "succeeded": 6,
        "failed": 2,
        "in_flight": 2,
        "seconds": 4.0,
        "queue": "embed",
        "message": "no result for 5 s",
        "rate": 2.0,
        "before": 0,
        "results": "out.jsonl",
        "errors": "out.errors.jsonl",
        "first_failure": "in.csv, line 3: ItemFailed: no good",
    }
    text = describe(summary)
    assert "failures in out.errors.jsonl; the first: in.csv, line 3: ItemFailed: no good" in text
    assert "no result for 5 s" in text
    assert "6 succeeded, 2 failed; results in out.jsonl" in text
    assert "2 jobs still in flight in queue 'embed'" in text


def test_expiry_priority_and_tenant_are_options_of_each_job() -> None:
    sending = SubmitOptions(expires_s=5, priority=3, tenant="acme").sending
    assert (sending["expires"], sending["priority"]) == (5, 3)
    assert "acme" in str(sending["headers"])


def test_progress_line_has_the_time_left_if_it_is_known() -> None:
    run = Snapshot(1300, 1200, 3, 97, 401.0, 5213)
    assert figures(run) == "1,200 done, 3 failed, 97 in flight, 401/s, 0:10 left"
    assert "left" not in figures(Snapshot(1, 0, 0, 1, 0.0, None))
    assert [duration(42), duration(725), duration(3723)] == ["0:42", "12:05", "1:02:03"]
