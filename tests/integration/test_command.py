"""What commands are as processes: what they import, how they end, what a shell completes."""

import json
import os
import subprocess
import sys

import pytest

from support.patience import patient


def list_imported(code: str, before: str = "pass") -> set[str]:
    """The modules that some code imports, beside those of the code before."""
    told = f"import json, sys; {before}; there = {{*sys.modules}}; {code}"
    told += "; print(json.dumps([*{*sys.modules} - there]))"
    out = subprocess.check_output([sys.executable, "-W", "ignore", "-c", told], timeout=patient(60))
    return set(json.loads(out))


def test_a_command_is_only_imported_when_it_is_asked_for() -> None:
    loaded = list_imported("import batchery.cli.main")
    assert not {"batchery.cli.stats", "batchery_worker", "batchery_producer", "torch"} & loaded


def test_celery_s_command_imports_no_more_of_ours_than_names() -> None:
    """Celery loads it for each of its own commands, such as `celery --version`."""
    points = "from importlib.metadata import entry_points as find"
    load = "[each.load() for each in find(group='celery.commands', name='batchery')]"
    loaded = list_imported(load, f"{points}; import celery.worker.control")
    assert loaded == {
        *("batchery", "batchery.protocol", "batchery.protocol.commands"),
        *("batchery_worker", "batchery_worker.remote_control"),
    }


@pytest.mark.parametrize(
    ("words", "offered"),
    [("batchery su", "plain,submit"), ("batchery submit --over", "plain,--overwrite")],
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
