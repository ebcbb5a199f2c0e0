"""What a running `batchery up` tells the commands in its folder: the URL of its Redis.

The file is there for as long as `up` is ready. It has the password, so only its owner may read it.
`up` holds a lock on it: a file that nobody has locked was left by an `up` that was killed.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

#: The file's name, in the folder in which `up` was started.
FILE = ".batchery-up.json"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A running `batchery up`.

    Attributes:
        redis_url: URL of its Redis, with the password.
        app: The app that it serves, as for `celery -A`.
    """

    redis_url: str
    app: str


def find_announcement(folder: Path | None = None) -> Announcement | None:
    """What a running `up` has announced in a folder, by default the current one.

    Returns:
        None if none runs there, or if the file is of somebody else or open to others: it could name
        a stranger's Redis.
    """
    try:
        descriptor = os.open((folder or Path()) / FILE, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="utf-8") as file:
        if not _is_private(descriptor) or not _is_locked(descriptor):
            return None
        try:
            return Announcement(**json.load(file))
        except (OSError, ValueError, TypeError):
            return None


@contextmanager
def announce(info: Announcement, folder: Path | None = None) -> Iterator[bool]:
    """Announces an `up` in a folder while entered.

    Yields:
        Whether it is announced: not where another one runs there, or where no file can be written.
    """
    path = (folder or Path()).absolute() / FILE
    descriptor = None if find_announcement(path.parent) else _written(path, info)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _written(path: Path, info: Announcement) -> int | None:
    """Writes the file; returns the descriptor that holds its lock, or None."""
    if sys.platform == "win32":
        return None
    import fcntl  # Windows has none, where clients run, too.

    try:
        # It is locked and complete as soon as it has its name.
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{FILE}-")
    except OSError:
        return None
    try:
        os.write(descriptor, json.dumps(asdict(info)).encode())
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        Path(temporary).replace(path)
    except OSError:
        os.close(descriptor)
        with suppress(OSError):
            Path(temporary).unlink()
        return None
    return descriptor


def _is_private(descriptor: int) -> bool:
    info = os.fstat(descriptor)
    is_mine = sys.platform == "win32" or info.st_uid == os.getuid()
    return is_mine and not stat.S_IMODE(info.st_mode) & 0o077


def _is_locked(descriptor: int) -> bool:
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
