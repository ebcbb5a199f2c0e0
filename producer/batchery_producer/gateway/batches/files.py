"""Files of the gateway's callers: contents in a store, all that is known of them in Redis.

    OWNER/files/ID.jsonl     in the store: the content of a file
    files:OWNER              in Redis: the record of each file, and the sum of their bytes
    removals                 in Redis: OWNER/ID of what is to be removed, by when

The store is a folder, or any URL that fsspec knows. A file is reserved before it is written, and
removed by itself if it is never made known. An id of another owner is an id that is not there.
"""

import hashlib
import json
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from celery.utils.functional import chunks
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, Field

from batchery.errors import DatasetError
from batchery_producer.files.source import Remote, is_url
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

# Files as OpenAI's clients see them


#: Purpose of files that a batch reads, and of those that it writes.
INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

#: How long a caller may have a file kept, in seconds.
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000

FILE_ID = r"file-[0-9a-f]{46}"


def new_id(prefix: str) -> str:
    """An id that can't be guessed; those of one prefix sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(16)}"


class ExpiresAfter(BaseModel):
    """How long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


# Where contents are kept


logger = logging.getLogger(__name__)

#: Bytes that are read or written at a time.
CHUNK_BYTES = 256 * 1024


class Storage:
    """Named files in a folder, or wherever else a filesystem of fsspec keeps them.

    Nobody reads a file before it is whole, as its name becomes known then. So it is written in its
    place, and what a killed process has left of one is removed like any other file.

    All methods raise a `DatasetError` if the place cannot be reached. For use by several threads.
    """

    def __init__(self, url: str) -> None:
        """Finds the filesystem, and touches nothing yet.

        Args:
            url: A folder or a URL. A relative folder is one of the current directory.
        """
        remote = Remote.at(url if is_url(url) else str(Path(url).absolute()))
        self._files: Any = remote.filesystem
        self._root = remote.path.rstrip("/")
        self._is_local = isinstance(self._files, LocalFileSystem)

    def open(self, name: str) -> BinaryIO | None:
        """Opens a file for reading; None if there is none."""
        with _reaching(name):
            try:
                opened = self._files.open(self._path(name), "rb")
            except FileNotFoundError:
                return None
        # Files of fsspec's own cannot read a line up to a maximum.
        return opened if self._is_local else BufferedReader(opened, CHUNK_BYTES)

    def write(self, name: str, parts: Iterable[bytes]) -> int:
        """Writes a file, and returns how many bytes it has."""
        path, size = self._path(name), 0
        with _reaching(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._files.open(path, "wb") as file:
                for part in parts:
                    file.write(part)
                    size += len(part)
                if self._is_local:
                    file.flush()
                    os.fsync(file.fileno())
        return size

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its files, if it is there."""
        path = self._path(name)
        with _reaching(name), suppress(FileNotFoundError):
            self._files.invalidate_cache(path)
            self._files.rm(path, recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    try:
        yield
    except (DatasetError, Problem):
        raise
    except Exception as error:
        # Callers see it, and the whole text may name hosts, folders and users.
        logger.warning("files: %s: %r", name, error)
        text = getattr(error, "strerror", None) or type(error).__name__
        raise DatasetError(f"the store of files cannot be reached: {text}") from error


# The files


#: Maximum characters of a file's name; the rest of a longer one is cut off.
MAX_NAME_CHARS = 255

#: Maximum characters of a folder that is named after its owner.
MAX_OWNER_CHARS = 120

#: Records that are read at a time, where only some of them are wanted.
PAGE = 100

#: Maximum number of files of one owner, as a list of files looks at the ids of all.
MAX_FILES = 100_000

#: How long it may take to write a file, in seconds; what is not known by then is removed.
WRITING_S = 86_400.0

#: After how long what could not be removed is tried again, in seconds.
ASK_S = 60.0


class FileIsGone(Problem):
    """There is no such file, or its time is over."""

    def __init__(self, file_id: str) -> None:
        text = f"file {file_id!r:.100}: no such file"
        super().__init__(Kind.NOT_FOUND, text, code="file_not_found", param="id")


def get_owner(caller: Caller) -> str:
    """Whose files a caller has: those of the tenant, so that a new key finds them."""
    kind, name = ("tenant", caller.tenant) if caller.tenant else ("key", caller.name)
    quoted = quote(name, safe="")
    if len(quoted) > MAX_OWNER_CHARS:
        quoted = hashlib.sha256(name.encode()).hexdigest()
    return f"{kind}-{quoted}"


class FileStore:
    """The files."""

    def __init__(self, store: Store, storage: Storage) -> None:
        self._store = store
        self.storage = storage
        self.removals_key = store.key("removals")

    def upload(
        self, caller: Caller, filename: str, content: BinaryIO, size: int, expires_s: int | None
    ) -> FileObject:
        """Keeps an uploaded file; holds a part of it in memory at a time.

        Args:
            caller: Whose it is.
            filename: Its name.
            content: What is in it.
            size: Its bytes.
            expires_s: How long it is kept, in seconds; None for ever.

        Raises:
            Problem: It is empty, or the caller has no space for it.
        """
        if not size:
            raise Problem(Kind.EMPTY, "file: empty; send a line at least", param="file")
        owner = get_owner(caller)
        file = describe_file(filename, INPUT_PURPOSE, size, expires_s)
        parts = iter(lambda: content.read(CHUNK_BYTES), b"")
        self.keep(owner, file, parts, caller.max_stored_bytes)
        keys = [self.get_key(owner), self.removals_key]
        if not self._store.script("publish_file", keys, *self.publishing(owner, file)):
            raise Problem(Kind.TOO_SLOW, f"file {file.id}: was written for too long; send it again")
        return file

    def keep(
        self, owner: str, file: FileObject, parts: Iterable[bytes], max_bytes: int = 0
    ) -> None:
        """Writes a file; it is removed by itself if it is not made known, and takes no space.

        Raises:
            Problem: The files of its owner have too many bytes already, or are too many.
        """
        self._reserve(owner, file, max_bytes)
        try:
            self.storage.write(_content(owner, file.id), parts)
        except BaseException:
            # Its removal stays due, so what the store has of it goes when that is back.
            self._forget(owner, file.id)
            with suppress(DatasetError):
                self.remove(owner, file.id)
            raise

    def _reserve(self, owner: str, file: FileObject, max_bytes: int) -> None:
        record = json.dumps({**file.model_dump(), "is_hidden": True})
        keys = [self.get_key(owner), self.removals_key]
        member, until_s = f"{owner}/{file.id}", time.time() + WRITING_S
        args = (file.id, record, file.bytes, max_bytes, member, until_s, MAX_FILES)
        stored = self._store.script("reserve_file", keys, *args)
        if stored == -2:
            text = f"file: there are {MAX_FILES} already; delete those that are not needed any more"
            raise Problem(Kind.TOO_LARGE, text, param="file")
        if stored >= 0:
            raise Problem(
                Kind.TOO_LARGE,
                f"file of {file.bytes} bytes: with the {stored} that are stored, it has more than"
                f" max_stored_bytes = {max_bytes}; delete files that are not needed any more",
                param="file",
            )

    @staticmethod
    def publishing(owner: str, file: FileObject) -> tuple[str, str, str, Any]:
        """What scripts need to make a file known."""
        expires_at = "" if file.expires_at is None else file.expires_at
        return file.id, file.model_dump_json(), f"{owner}/{file.id}", expires_at

    def get(self, owner: str, file_id: str) -> FileObject:
        """A file.

        Raises:
            FileIsGone: There is none, or its time is over.
        """
        content = None
        if re.fullmatch(FILE_ID, file_id):
            content = self._store.call(lambda client: client.hget(self.get_key(owner), file_id))
        found = _known(content)
        if found is None:
            raise FileIsGone(file_id)
        return found

    def page(
        self, owner: str, after: str | None, limit: int, *, newest_first: bool, purpose: str | None
    ) -> tuple[list[FileObject], bool]:
        """Some files, and whether there are more."""
        keys = self._store.call(lambda client: client.hkeys(self.get_key(owner)))
        # Ids sort by time. The one that the page comes after need not be there any more.
        ids = sorted((each.decode() for each in keys if each != b"bytes"), reverse=newest_first)
        rest = (
            each for each in ids if not after or (each < after if newest_first else each > after)
        )
        found: list[FileObject] = []
        for some in chunks(rest, PAGE):
            contents = self._store.call(lambda client: client.hmget(self.get_key(owner), some))  # noqa: B023
            files = [file for each in contents if (file := _known(each)) is not None]
            found += [file for file in files if purpose in (None, file.purpose)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def open(self, owner: str, file_id: str) -> BinaryIO:
        """Opens the content of a file.

        Raises:
            FileIsGone: There is none.
        """
        opened = self.storage.open(_content(owner, file_id))
        if opened is None:
            raise FileIsGone(file_id)
        return opened

    def remove(self, owner: str, file_id: str) -> None:
        """Removes a file, if it is there."""
        # This first: a file without a content can be removed again.
        self.storage.remove(_content(owner, file_id))
        self._forget(owner, file_id, f"{owner}/{file_id}")

    def _forget(self, owner: str, file_id: str, removal: str = "") -> None:
        keys = [self.get_key(owner), self.removals_key]
        self._store.script("remove_file", keys, file_id, removal)

    def expired(self) -> list[tuple[str, str]]:
        """Owners and ids of what is to be removed by now; it counts as asked for a minute."""
        due = self._store.take_due(self.removals_key, PAGE, ASK_S)
        # One that the store does not remove ends a round, and must not come first in each.
        random.shuffle(due)
        return [(owner, id_) for owner, _, id_ in (each.partition("/") for each in due)]

    def get_key(self, owner: str) -> bytes:
        """The key of an owner's files."""
        return self._store.key("files", owner)


def describe_file(filename: str, purpose: str, size: int, expires_s: int | None) -> FileObject:
    """The record of a new file, under an id of its own."""
    now_s = int(time.time())
    return FileObject(
        id=new_id("file-"),
        bytes=size,
        created_at=now_s,
        # A caller's charset may make half characters, which no JSON of ours can have.
        filename=filename[:MAX_NAME_CHARS].encode(errors="replace").decode(),
        purpose=purpose,
        expires_at=None if expires_s is None else now_s + expires_s,
    )


def _known(content: bytes | None) -> FileObject | None:
    """The file of a record, if it is known by now and its time is not over."""
    if content is None or (record := json.loads(content)).get("is_hidden"):
        return None
    file = FileObject.model_validate(record)
    return None if file.expires_at is not None and time.time() >= file.expires_at else file


def _content(owner: str, file_id: str) -> str:
    return f"{owner}/files/{file_id}.jsonl"
