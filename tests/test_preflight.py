"""What `make` says before the long installation."""

import importlib.util
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
