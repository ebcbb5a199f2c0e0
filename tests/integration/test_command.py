"""The `batchery` command: errors in one line, plugins that cannot break each other."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.harness import wait_for
from support.patience import patient

PLUGINS = '''
import pathlib, signal, time
import click
from batchery.errors import GaveUp, SettingsError, StartError

@click.command()
def refuse() -> None:
    """Refuse to start."""
    raise SettingsError("setting x: too large; make it smaller")

@click.command()
def own_code() -> None:
    error = StartError("the worker has ended")
    error.exit_code = 1
    raise error

@click.command()
def give_up() -> None:
    raise GaveUp("Redis stays away; start it")

@click.command()
def defect() -> None:
    raise ValueError("a defect")

@click.command()
@click.argument("file")
def sleep(file: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background has it off.
    pathlib.Path(file).touch()
    while True:  # A signal just before one long sleep would wake nobody.
        time.sleep(0.05)

not_a_command = 7
'''

ENTRY_POINTS = """
[batchery.commands]
refuse = plugins_of_test:refuse
own-code = plugins_of_test:own_code
give-up = plugins_of_test:give_up
defect = plugins_of_test:defect
sleep = plugins_of_test:sleep
no-command = plugins_of_test:not_a_command
broken = no_such_package_of_test:command
"""


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that brings good and bad subcommands."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "plugins_of_test.py").write_text(PLUGINS)
    metadata = folder / "plugins_of_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins-of-test\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def start(plugins: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "batchery", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(plugins), "COLUMNS": "200"},
    )


def run(plugins: Path, *arguments: str) -> tuple[int, str, str]:
    with start(plugins, *arguments) as process:
        out, err = process.communicate(timeout=patient(60))
        return process.returncode, out, err


def test_help_lists_all_commands_and_a_broken_one_names_itself(plugins: Path) -> None:
    code, out, err = run(plugins, "--help")
    assert (code, err) == (0, "")
    commands = " ".join(out.split("Commands:")[1].split())
    assert "refuse Refuse to start." in commands
    assert "broken cannot be loaded: ModuleNotFoundError: No module named 'no_such_" in commands
    assert "no-command cannot be loaded: TypeError: plugins_of_test:not_a_command is" in commands
    assert "up Run Redis, a worker, Flower and the HTTP gateway" in commands


def test_a_command_is_only_imported_when_it_is_asked_for(plugins: Path) -> None:
    code = "import sys, batchery.cli.main; print(*sys.modules)"
    out = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONPATH": str(plugins)}
    )
    loaded = out.split()
    assert not {"plugins_of_test", "batchery_worker", "batchery_producer", "torch"} & set(loaded)


def test_the_version_is_that_of_the_package(plugins: Path) -> None:
    code, out, _ = run(plugins, "--version")
    assert code == 0
    assert out.startswith("batchery, version ")


def test_command_that_cannot_start_prints_one_line_and_exits_with_2(plugins: Path) -> None:
    said = "batchery: error: setting x: too large; make it smaller\n"
    assert run(plugins, "refuse") == (2, "", said)


def test_an_error_may_bring_an_exit_code_of_its_own(plugins: Path) -> None:
    assert run(plugins, "own-code") == (1, "", "batchery: error: the worker has ended\n")


def test_any_error_of_ours_is_one_line(plugins: Path) -> None:
    assert run(plugins, "give-up") == (69, "", "batchery: error: Redis stays away; start it\n")


def test_the_traceback_is_there_for_those_who_ask(plugins: Path) -> None:
    code, _, err = run(plugins, "--traceback", "refuse")
    assert code == 2
    assert "plugins_of_test.py" in err
    assert err.endswith("batchery: error: setting x: too large; make it smaller\n")


def test_a_bulk_run_has_its_traceback_too(plugins: Path) -> None:
    code, _, err = run(plugins, "--traceback", "submit", "absent.txt", "--task", "a", "-o", "b")
    assert code == 2
    assert "Traceback" in err
    assert "batchery: error: absent.txt: cannot be read: No such file" in err


@pytest.mark.parametrize("url", ["http://host:99999", "http://[::1", "http://host:port", "host"])
def test_probe_of_what_is_no_url_exits_with_2(plugins: Path, url: str) -> None:
    code, out, err = run(plugins, "health", "--url", url)
    assert (code, out) == (2, "")
    assert err.startswith(f"batchery: error: --url {url!r}: it is no URL of a worker; write it as")


def test_probe_of_a_host_that_cannot_be_is_no_defect(plugins: Path) -> None:
    code, out, err = run(plugins, "health", "--url", "http://a..b")
    assert (code, out) == (1, "")
    assert err.startswith("http://a..b does not answer: ")


def test_a_job_without_an_id_is_a_usage_error(plugins: Path) -> None:
    code, _, err = run(plugins, "explain", "")
    assert (code, err.splitlines()[-1]) == (2, "Error: TASK_ID is empty")


@pytest.mark.parametrize("name", ["shop", "shop.search", "a b", "größe", 'a"b\\c'])
def test_key_of_any_name_is_a_table_of_the_settings(plugins: Path, name: str) -> None:
    code, out, _ = run(plugins, "key", name)
    table = tomllib.loads(out.partition("For batchery.toml:\n")[2])
    assert (code, [*table["gateway"]["keys"]]) == (0, [name])


def test_a_defect_is_not_hidden(plugins: Path) -> None:
    code, _, err = run(plugins, "defect")
    assert code == 70
    assert "Traceback" in err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["some", "--option=1"]])
def test_a_broken_command_says_why_and_what_to_do(plugins: Path, arguments: list[str]) -> None:
    code, out, err = run(plugins, "broken", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("batchery: error: command 'broken' (no_such_package_of_test:command of")
    assert "No module named 'no_such_package_of_test'" in err
    assert "reinstall plugins-of-test or remove it" in err
    assert err.count("\n") == 1


def test_an_unknown_command_is_a_usage_error(plugins: Path) -> None:
    code, _, err = run(plugins, "no-such-thing")
    assert code == 2
    assert "No such command 'no-such-thing'" in err


@pytest.mark.parametrize(
    ("typed", "nearest"), [("dead-letters", "dead"), ("stat", "stats"), ("refusal", "refuse")]
)
def test_unknown_command_is_refused_with_the_nearest_one(
    plugins: Path, typed: str, nearest: str
) -> None:
    code, _, err = run(plugins, typed)
    assert code == 2
    assert f"No such command '{typed}'. Did you mean '{nearest}'?" in err


def test_ctrl_c_ends_it_with_130_and_no_word(plugins: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    with start(plugins, "sleep", str(started)) as process:
        wait_for(started.exists, "the command runs")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=patient(60))
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [("batchery su", "plain,submit"), ("batchery submit --ord", "plain,--ordered")],
)
def test_the_shell_completes_commands_and_options(words: str, offered: str) -> None:
    environment = {
        "_BATCHERY_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "batchery"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
    )
    assert done.stdout.split() == [offered]
