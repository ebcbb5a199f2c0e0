"""What `make` says before the long installation."""

import importlib.util
import subprocess
import sys
from pathlib import Path
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


def test_the_script_runs_as_make_runs_it() -> None:
    for arguments, printed in (
        (["check"], ""),
        (["torch-index", "https://mirror"], "https://mirror"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, printed), done.stderr
