"""An older Celery beside us: one line says what is needed."""

import subprocess
import sys

import pytest

OLDER = """
import celery
celery.VERSION, celery.__version__ = celery.VERSION._replace(minor=6), "5.6.3"
import batchery
batchery.{name}
"""


@pytest.mark.parametrize("name", ["BatchTask", "install", "Client", "register"])
def test_an_older_celery_is_named(name: str) -> None:
    made = subprocess.run(
        [sys.executable, "-c", OLDER.format(name=name)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 1
    assert made.stderr.splitlines()[-1] == (
        "batchery.errors.StartError: Celery 5.6.3 is too old: pip install -U 'celery[redis]>=5.7'"
    )
