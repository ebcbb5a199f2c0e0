"""Where files are kept: a folder, or any URL that fsspec knows."""

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from batchery.errors import DatasetError
from batchery_producer.files.source import Remote, is_url

logger = logging.getLogger(__name__)

#: Ending of files that are not whole yet.
NEW_SUFFIX = ".new"

#: After so long, in seconds, a file that is not whole was left by a process that was killed: no
#: upload may take that long.
TORN_AFTER_S = 86_400

#: Bytes that are read or written at a time.
CHUNK_BYTES = 256 * 1024


class Storage:
    """Named files. A name is a path with slashes.

    Each file appears whole or not at all: in folders, in object stores, and wherever else a
    filesystem of fsspec knows how.

    All methods raise a `DatasetError` if the place cannot be reached. For use by several threads.
    """

    def __init__(self, url: str) -> None:
        """Finds the filesystem, and touches nothing yet.

        Args:
            url: A folder or a URL. A relative folder is one of the current directory.

        Raises:
            DatasetError: There is no such filesystem, or its package is not installed.
        """
        self._url = url if is_url(url) else str(Path(url).absolute())
        remote = Remote.at(self._url)
        self._files: Any = remote.filesystem
        self._root = remote.path.rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)
        self._folders: set[str] = set()

    def build_url(self, name: str) -> str:
        """Path or URL of a file."""
        return self._path(name) if self._is_local else f"{self._url.rstrip('/')}/{name}"

    def names(self, folder: str) -> Sequence[str]:
        """Names in a folder, without the folder's, sorted; none if there is no such folder."""
        path = self._path(folder)
        with self._reaching(folder):
            self._files.invalidate_cache(path)
            try:
                found = self._files.ls(path, detail=False)
            except FileNotFoundError:
                return []
        names = (str(each).rstrip("/").rpartition("/")[2] for each in found)
        return sorted(name for name in names if not name.endswith(NEW_SUFFIX))

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if there is none."""
        with self._reaching(name):
            try:
                return bytes(self._files.cat_file(self._path(name)))
            except FileNotFoundError:
                return None

    def read_many(self, names: Sequence[str]) -> Sequence[bytes]:
        """Content of those files that are there, in order."""
        if not names:
            return []
        paths = [self._path(name) for name in names]
        with self._reaching(names[0]):
            found = self._files.cat(paths, on_error="omit")
        return [bytes(found[path]) for path in paths if path in found]

    def open(self, name: str) -> BinaryIO | None:
        """Opens a file for reading; None if there is none."""
        with self._reaching(name):
            try:
                opened = self._files.open(self._path(name), "rb")
            except FileNotFoundError:
                return None
        # Files of fsspec's own cannot read a line up to a maximum.
        return opened if self._is_local else BufferedReader(opened, CHUNK_BYTES)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, in place of one that is there."""
        with self.create(name) as file:
            file.write(content)

    @contextmanager
    def create(self, name: str) -> Iterator["WrittenFile"]:
        """A file to write, which replaces one of its name when the block ends without an error."""
        path = self._path(name)
        with self._reaching(name):
            self._make_folder(path.rpartition("/")[0])
        writing = self._writing_here(path) if self._is_local else self._writing_there(path)
        with self._reaching(name):
            file = writing.__enter__()
        try:
            yield WrittenFile(file, partial(self._reaching, name))
        except BaseException as error:
            # It raises the same again, which is the caller's own.
            writing.__exit__(type(error), error, error.__traceback__)
            raise
        with self._reaching(name):
            writing.__exit__(None, None, None)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with self._reaching(name), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def remove_folder(self, folder: str) -> None:
        """Removes a folder and its files, if it is there."""
        path = self._path(folder)
        with self._reaching(folder), suppress(FileNotFoundError):
            self._files.invalidate_cache(path)
            self._files.rm(path, recursive=True)
        self._folders.discard(path)

    def remove_torn(self, now_s: float) -> None:
        """Removes what killed processes have left of files; object stores have rules for that.

        Args:
            now_s: The time, in Unix seconds.
        """
        if not self._is_local:
            return
        for path in Path(self._root).rglob(f"*{NEW_SUFFIX}"):
            with suppress(OSError):  # Another gateway may tidy up as well.
                if now_s - path.stat().st_mtime > TORN_AFTER_S:
                    path.unlink()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, path: str) -> None:
        if self._is_local:
            os.makedirs(path, exist_ok=True)
        elif path not in self._folders:
            self._files.makedirs(path, exist_ok=True)
            self._folders.add(path)

    @contextmanager
    def _writing_here(self, path: str) -> Iterator[BinaryIO]:
        new = f"{path}.{secrets.token_hex(4)}{NEW_SUFFIX}"
        try:
            with open(new, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(new)
            raise

    @contextmanager
    def _writing_there(self, path: str) -> Iterator[BinaryIO]:
        file = self._files.open(path, "wb", autocommit=False)
        try:
            yield file
            file.close()
        except BaseException:
            with suppress(Exception):  # Not every filesystem can.
                file.discard()
            raise
        # Those that can't have done it when it was closed.
        getattr(file, "commit", lambda: None)()

    @contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        try:
            yield
        except DatasetError:
            raise
        except Exception as error:
            # Callers see it, and the whole text may name hosts, folders and users.
            logger.warning("files: %s: %r", name, error)
            text = getattr(error, "strerror", None) or type(error).__name__
            raise DatasetError(f"files: {name}: cannot be reached: {text}") from error


class WrittenFile:
    """A file that is being written; a `DatasetError` says what went wrong with it."""

    def __init__(
        self, file: BinaryIO, reaching: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._file = file
        self._reaching = reaching

    def write(self, content: bytes) -> None:
        """Adds to the file."""
        with self._reaching():
            self._file.write(content)

    def flush(self) -> None:
        """Lets go of what is held in memory, as far as the filesystem takes parts."""
        with self._reaching():
            self._file.flush()

    def tell(self) -> int:
        """How many bytes were written."""
        return self._file.tell()
