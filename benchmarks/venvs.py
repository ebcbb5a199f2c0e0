"""Environments of other systems, each made when it is first needed."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

#: The repository: what runs in another environment finds `benchmarks.peers` here.
ROOT = Path(__file__).resolve().parents[1]

#: Beside what git and the linters ignore anyway; `make clean` removes it.
FOLDER = ROOT / ".venv" / "peers"


def child_environment(**variables: str) -> dict[str, str]:
    """What a child inherits that finds our packages where this process does, and `benchmarks`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def python_of(requirements: Sequence[str]) -> Path:
    """The Python of an environment that has these packages, and their dependencies.

    Args:
        requirements: Pinned, as for pip, and named like the last one; none means the Python that
            runs now.

    Raises:
        SystemExit: They cannot be installed.
    """
    if not requirements:
        return Path(sys.executable)
    # Not as it stands: some packages look for their own files by patterns, which have brackets.
    name = re.sub(r"\W+", "-", requirements[-1].partition("==")[0]).strip("-")
    folder = FOLDER / name
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
