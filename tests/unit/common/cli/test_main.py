"""The `batchery` command: its help, and errors in one line."""

import tomllib

import click
import pytest
from click.testing import CliRunner, Result

from batchery.cli.main import PLACES, main
from batchery.errors import GaveUp, SettingsError, StartError


@click.command()
def refuse() -> None:
    """Refuse to start."""
    raise SettingsError("setting x: too large; make it smaller")


@click.command()
def own_code() -> None:
    """End with an exit code of its own."""
    error = StartError("the worker has ended")
    error.exit_code = 1
    raise error


@click.command()
def give_up() -> None:
    """Give up."""
    raise GaveUp("Redis stays away; start it")


@click.command()
def defect() -> None:
    """Have a defect."""
    raise ValueError("a defect")


@pytest.fixture(autouse=True)
def _more_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that end in each way, beside our own."""
    for name in ("refuse", "own_code", "give_up", "defect"):
        monkeypatch.setitem(PLACES, name.replace("_", "-"), f"{__name__}:{name}")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_has_all_commands() -> None:
    done = run("--help")
    assert done.exit_code == 0
    listed = [line.split()[0] for line in done.output.partition("Commands:\n")[2].splitlines()]
    assert listed == sorted(PLACES)


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").output.startswith("batchery, version ")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("refuse", 2, "setting x: too large; make it smaller"),
        ("own-code", 1, "the worker has ended"),
        ("give-up", 69, "Redis stays away; start it"),
    ],
)
def test_an_error_of_ours_is_one_line_and_its_exit_code(name: str, code: int, text: str) -> None:
    done = run(name)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"batchery: error: {text}\n")


def test_the_traceback_is_there_for_those_who_ask() -> None:
    done = run("--traceback", "refuse")
    assert done.exit_code == 2
    assert __file__.rpartition("/")[2] in done.stderr
    assert done.stderr.endswith("batchery: error: setting x: too large; make it smaller\n")


def test_a_defect_is_not_hidden() -> None:
    done = run("defect")
    assert done.exit_code == 70
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("no-such-thing", "No such command 'no-such-thing'"),
        ("dead-letters", "Did you mean one of these?\n    dead\n"),
        ("stat", "Did you mean one of these?\n    stats\n"),
        ("refusal", "Did you mean one of these?\n    refuse\n"),
    ],
)
def test_unknown_command_is_refused_with_the_nearest_one(typed: str, answer: str) -> None:
    done = run(typed)
    assert (done.exit_code, answer in done.stderr) == (2, True)


def test_a_job_without_an_id_is_a_usage_error() -> None:
    done = run("explain", "")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, "Error: TASK_ID is empty")


@pytest.mark.parametrize("name", ["shop", "shop.search", "a b", "größe", 'a"b\\c'])
def test_key_of_any_name_is_a_table_of_the_settings(name: str) -> None:
    done = run("key", name)
    table = tomllib.loads(done.stdout.partition("For batchery.toml:\n")[2])
    assert (done.exit_code, [*table["gateway"]["keys"]]) == (0, [name])
