"""Files of the gateway's callers: contents in a store, all that is known of them in Redis.

    OWNER/files/ID/PART      in the store: the content of a file, in one part or in several
    files:OWNER              in Redis, a hash: the record of each file, and the sum of their bytes

The store is a folder, or any URL that fsspec knows. A file is known before it is written, and until
its content is removed: what is left of an upload that was killed is its caller's to delete. An id
of another owner is an id that is not there.
"""

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

from celery.utils.functional import chunks
from fsspec.core import url_to_fs
from pydantic import BaseModel

from batchery.errors import DatasetError
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

logger = logging.getLogger(__name__)

# Files as OpenAI's clients see them


#: Purpose of files that a batch reads, and of those that it writes.
INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

FILE_ID = r"file-[0-9a-f]{46}"

#: Maximum characters of a file's name; the rest of a longer one is cut off.
MAX_NAME_CHARS = 255


def new_id(prefix: str) -> str:
    """An id that can't be guessed; those of one prefix sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(16)}"


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: None = None


#: The only part of an upload.
WHOLE = "content.jsonl"


class FileRecord(FileObject):
    """What is kept of a file, besides what clients see.

    Attributes:
        parts: Names of its parts, in their order.
    """

    parts: list[str] = [WHOLE]


def describe_file(
    file_id: str,
    filename: str,
    purpose: str,
    size: int,
    parts: Sequence[str] = (WHOLE,),
) -> FileRecord:
    """The record of a new file."""
    return FileRecord(
        id=file_id,
        bytes=size,
        created_at=int(time.time()),
        # A caller's charset may make half characters, which no JSON of ours can have.
        filename=filename[:MAX_NAME_CHARS].encode(errors="replace").decode(),
        purpose=purpose,
        parts=list(parts),
    )


# Where contents are kept


#: Bytes that are read or written at a time.
CHUNK_BYTES = 256 * 1024


class Storage:
    """Named files in a folder, or wherever else a filesystem of fsspec keeps them.

    Nobody is told of a file before it is whole, so it is written in its place.

    All methods raise a `DatasetError` if the place cannot be reached. For use by several threads.
    """

    def __init__(self, url: str) -> None:
        """Finds the filesystem, and touches nothing yet.

        Args:
            url: A folder or a URL. A relative folder is one of the current directory.
        """
        try:
            self._files, root = url_to_fs(url)
        except Exception as error:
            raise DatasetError(f"gateway.files = {url!r}: cannot be reached: {error}") from error
        self._root = root.rstrip("/")

    def open(self, name: str) -> BinaryIO | None:
        """Opens a file for reading; None if there is none."""
        with _reaching(name):
            try:
                opened = self._files.open(self._path(name), "rb")
            except FileNotFoundError:
                return None
        # Files of fsspec's own cannot read a line up to a maximum.
        return BufferedReader(opened, CHUNK_BYTES)

    def write(self, name: str, parts: Iterable[bytes]) -> int:
        """Writes a file, and returns how many bytes it has."""
        path, size = self._path(name), 0
        with _reaching(name):
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            with self._files.open(path, "wb") as file:
                for part in parts:
                    file.write(part)
                    size += len(part)
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


#: Maximum characters of a folder that is named after its owner.
MAX_OWNER_CHARS = 120

#: Records that are read at a time, where only some of them are wanted.
PAGE = 100

#: Maximum number of files of one owner, as a list of files looks at the ids of all.
MAX_FILES = 100_000

#: Field with the sum of an owner's bytes, among the records of the files.
BYTES = b"bytes"


class FileIsGone(Problem):
    """There is no such file."""

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

    def upload(self, caller: Caller, filename: str, content: BinaryIO, size: int) -> FileObject:
        """Keeps an uploaded file; holds a part of it in memory at a time.

        Args:
            caller: Whose it is.
            filename: Its name.
            content: What is in it.
            size: Its bytes.

        Raises:
            Problem: It is empty, or the caller has no space for it.
            DatasetError: The store cannot be reached, or is full.
        """
        if not size:
            raise Problem(Kind.EMPTY, "file: empty; send a line at least", param="file")
        owner = get_owner(caller)
        file = describe_file(new_id("file-"), filename, INPUT_PURPOSE, size)
        key = self._key(owner)

        def add(pipe: Any) -> None:
            stored, count = int(pipe.hget(key, BYTES) or 0), pipe.hlen(key)
            if stored + size > caller.max_stored_bytes:
                text = (
                    f"of {size} bytes: with the {stored} that are stored, it has more than"
                    f" max_stored_bytes = {caller.max_stored_bytes}; delete files that are not"
                    " needed any more"
                )
                raise Problem(Kind.TOO_LARGE, f"file {text}", param="file")
            if count > MAX_FILES:
                text = f"there are {MAX_FILES} already; delete those that are not needed any more"
                raise Problem(Kind.TOO_LARGE, f"file: {text}", param="file")
            pipe.multi()
            self.publish(pipe, owner, file)

        self._store.call(lambda client: client.transaction(add, key))
        try:
            parts = iter(lambda: content.read(CHUNK_BYTES), b"")
            self.storage.write(f"{locate(owner, file.id)}/{WHOLE}", parts)
        except BaseException:
            with suppress(DatasetError):
                self.storage.remove(locate(owner, file.id))
            self._forget(owner, file.id)
            raise
        return file

    def publish(self, pipe: Any, owner: str, file: FileRecord) -> None:
        """Makes a file known, by commands of a pipeline."""
        pipe.hincrby(self._key(owner), BYTES, file.bytes)
        pipe.hset(self._key(owner), file.id, file.model_dump_json())

    def get(self, owner: str, file_id: str) -> FileRecord:
        """A file.

        Raises:
            FileIsGone: There is none.
        """
        content = None
        if re.fullmatch(FILE_ID, file_id):
            content = self._store.call(lambda client: client.hget(self._key(owner), file_id))
        found = None if content is None else FileRecord.model_validate_json(content)
        if found is None:
            raise FileIsGone(file_id)
        return found

    def page(
        self, owner: str, after: str | None, limit: int, *, newest_first: bool, purpose: str | None
    ) -> tuple[list[FileRecord], bool]:
        """Some files, and whether there are more."""
        key = self._key(owner)
        keys = self._store.call(lambda client: client.hkeys(key))
        ids = sorted((each.decode() for each in keys if each != BYTES), reverse=newest_first)
        # Ids sort by time. The one that the page comes after need not be there any more.
        rest = (id_ for id_ in ids if not after or (id_ != after and (id_ < after) is newest_first))
        found: list[FileRecord] = []
        for some in chunks(rest, PAGE):
            contents = self._store.call(lambda client: client.hmget(key, some))  # noqa: B023
            files = (FileRecord.model_validate_json(each) for each in contents if each)
            found += [file for file in files if purpose in (None, file.purpose)]
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def open(self, owner: str, file_id: str, part: str = WHOLE) -> BinaryIO:
        """Opens the content of an upload, or a part of another file.

        Raises:
            FileIsGone: There is none.
            DatasetError: The store cannot be reached.
        """
        opened = self.storage.open(f"{locate(owner, file_id)}/{part}")
        if opened is None:
            raise FileIsGone(file_id)
        return opened

    def read(self, owner: str, file: FileRecord) -> Iterator[bytes]:
        """The content of a file, some at a time; raises as `open`."""
        for part in file.parts:
            with self.open(owner, file.id, part) as opened:
                while some := opened.read(CHUNK_BYTES):
                    yield some

    def remove(self, owner: str, file_id: str) -> None:
        """Removes a file, if it is there.

        Raises:
            DatasetError: The store cannot be reached.
        """
        self.storage.remove(locate(owner, file_id))
        self._forget(owner, file_id)

    def _forget(self, owner: str, file_id: str) -> None:
        key = self._key(owner)

        def forget(pipe: Any) -> None:
            record = pipe.hget(key, file_id)
            pipe.multi()
            if record is not None:
                pipe.hincrby(key, BYTES, -json.loads(record)["bytes"])
                pipe.hdel(key, file_id)

        self._store.call(lambda client: client.transaction(forget, key))

    def _key(self, owner: str) -> bytes:
        return self._store.key("files", owner)


def locate(owner: str, file_id: str) -> str:
    """The folder with the parts of a file."""
    return f"{owner}/files/{file_id}"
