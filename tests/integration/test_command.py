"""What commands are as processes: what they import, how they end, what a shell completes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import patient


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package that brings a subcommand."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "plugins_of_test.py").write_text("import click\nhello = click.Command('hello')\n")
    metadata = folder / "plugins_of_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins-of-test\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(
        "[batchery.commands]\nhello = plugins_of_test:hello\n"
    )
    return folder


def list_imported(code: str, plugins: Path, before: str = "pass") -> set[str]:
    """The modules that some code imports, beside those of the code before."""
    told = f"import json, sys; {before}; there = {{*sys.modules}}; {code}"
    told += "; print(json.dumps([*{*sys.modules} - there]))"
    out = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", told],
        env={**os.environ, "PYTHONPATH": str(plugins)},
        timeout=patient(60),
    )
    return set(json.loads(out))


def test_a_command_is_only_imported_when_it_is_asked_for(plugins: Path) -> None:
    loaded = list_imported("import batchery.cli.main", plugins)
    assert not {"plugins_of_test", "batchery_worker", "batchery_producer", "torch"} & loaded


def test_celery_s_command_imports_no_more_of_ours_than_names(plugins: Path) -> None:
    """Celery loads it for each of its own commands, such as `celery --version`."""
    points = "from importlib.metadata import entry_points as find"
    load = "[each.load() for each in find(group='celery.commands', name='batchery')]"
    loaded = list_imported(load, plugins, f"{points}; import celery.worker.control")
    assert loaded == {
        *("batchery", "batchery.protocol", "batchery.protocol.commands"),
        *("batchery_worker", "batchery_worker.remote_control"),
    }


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
