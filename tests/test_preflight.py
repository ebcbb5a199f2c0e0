"""What `make` says before the long installation."""

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "preflight.py"

MODULES = ("venv", "ensurepip", "ssl", "sqlite3")


@pytest.fixture(scope="module")
def preflight() -> Any:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("minor", [11, 12, 13, 14])
def test_nothing_is_missing_on_a_python_that_works(preflight: Any, minor: int) -> None:
    assert preflight.missing((3, minor, 0), "Linux", "glibc", MODULES, 9, 2) == []
    assert preflight.missing((3, minor, 0), "Darwin", "", MODULES, 9, 2) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": (3, 10, 13)}, "needs Python 3.11 or newer, but this is 3.10"),
        ({"modules": ("venv", "ssl", "sqlite3")}, "no module ensurepip: apt install python3.13-v"),
        ({"system": "Windows"}, "use WSL"),
        ({"libc": "musl"}, "no wheels for musl"),
        ({"free_bytes": 10**9}, "1.0 GB of disk are free here, and .venv needs 2 GB"),
    ],
)
def test_what_is_missing_is_named(preflight: Any, change: dict[str, Any], said: str) -> None:
    info = {
        "version": (3, 13, 0),
        "system": "Linux",
        "libc": "glibc",
        "modules": MODULES,
        "free_bytes": 9 * 10**9,
        "needed_bytes": 2 * 10**9,
    }
    [line] = preflight.missing(**{**info, **change})
    assert said in line


def test_torch_comes_without_cuda_where_nothing_could_use_it(preflight: Any) -> None:
    def chosen(given: str, system: str, driver: bool, reachable: bool) -> str:
        return str(preflight.torch_index(given, system, driver, lambda _: reachable)[0])

    assert chosen("", "Linux", False, True) == preflight.CPU_INDEX
    assert chosen("", "Linux", False, False) == ""
    assert chosen("", "Linux", True, True) == ""
    assert chosen("", "Darwin", False, True) == ""
    assert chosen("https://mirror", "Linux", False, True) == "https://mirror"


def test_a_venv_that_is_there_needs_no_room_for_another(
    preflight: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    assert preflight.main("check") == 1
    (tmp_path / ".venv").mkdir()
    assert preflight.main("check") == 0


def test_a_venv_whose_making_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    for name in ("Makefile", ".ci", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    made = tmp_path / "made"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> "{made}"\n')
    python.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={python}", "TORCH_INDEX=http://127.0.0.1:1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    # Our Python makes none, so that the installation ends there.
    assert "No module named pip" in done.stderr
    assert made.read_text().splitlines()[-1] == "-m venv --clear .venv"


def test_paths_with_spaces_reach_the_tests() -> None:
    command = ["make", "--no-print-directory", "--dry-run", "-o", ".venv/.installed", "test"]
    command += ["REDIS_SERVER=/a b/server"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shlex.split(done.stdout.replace("\\\n", ""))[0] == "TEST_REDIS_SERVER=/a b/server"


def test_the_script_runs_as_make_runs_it() -> None:
    for arguments, printed in (
        (["check"], ""),
        (["torch-index", "https://mirror"], "https://mirror"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, printed), done.stderr
