"""Environments of other systems, each made when it is first needed."""

import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

#: The repository: what runs in another environment finds `benchmarks.peers` here.
ROOT = Path(__file__).resolve().parents[1]

#: Beside what git and the linters ignore anyway; `make clean` removes it.
FOLDER = ROOT / ".venv" / "peers"


def python_of(name: str, requirements: Sequence[str], parent: Path = FOLDER) -> Path:
    """The Python of an environment that has these packages, and their dependencies.

    Args:
        name: Of the environment.
        requirements: Pinned, as for pip; none means the Python that runs now.
        parent: Where environments are.

    Raises:
        SystemExit: They cannot be installed.
    """
    if not requirements:
        return Path(sys.executable)
    folder = parent / name
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    wanted = "\n".join(requirements)
    if not done.is_file() or done.read_text(encoding="utf-8") != wanted:
        print(f"installing {' '.join(requirements)}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*install, *requirements], check=False).returncode:
            raise SystemExit(f"{name}: cannot install {requirements}; leave it out by --systems")
        done.write_text(wanted, encoding="utf-8")
    return python
