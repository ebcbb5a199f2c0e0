"""The standalone app in a fresh process."""

import os
import subprocess
import sys
from pathlib import Path


def run(directory: Path, script: str, **variables: str) -> str:
    """Runs Python code with these settings alone; returns what it prints."""
    ours = ("BATCHERY_", "CELERY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    ended = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        cwd=directory,
        env={**kept, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    return ended.stdout


def test_standalone_app_reads_no_setting_when_it_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys, batchery.app\n"
        "from batchery.errors import SettingsError\n"
        "assert 'torch' not in sys.modules\n"
        "try: batchery.app.app.conf.broker_url\n"
        "except SettingsError as error: assert 'BATCHERY_TYPO' in str(error)\n"
        "else: sys.exit('the broken variable went unnoticed')\n"
    )
    (tmp_path / "batchery.toml").write_text("broken")
    run(tmp_path, script, BATCHERY_TYPO="1")


def test_standalone_app_takes_its_redis_from_the_settings(tmp_path: Path) -> None:
    script = (
        "from batchery.app import app\n"
        "print(app.conf.broker_url, app.conf.result_backend, app.conf.result_expires)"
    )
    settings = {"BATCHERY_REDIS_URL": "redis://one:1/2", "BATCHERY_RESULT_EXPIRES_S": "60"}
    said = run(tmp_path, script, **settings)
    assert said.split() == ["redis://one:1/2", "redis://one:1/2", "60"]
