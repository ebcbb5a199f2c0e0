"""Files and batches of the gateway's callers.

    OWNER/files/ID.json      what clients see of a file
    OWNER/files/ID.jsonl     its content
    OWNER/batches/ID.json    the record of a batch; only the holder of its lease writes it
    OWNER/batches/ID.cancel  when it was to be cancelled; anybody may write it
    OWNER/pieces/ID/         what has come back, while it runs
    open/OWNER,ID            the batch is not over

An id of another owner is an id that is not there.
"""

import hashlib
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool

from batchery_producer.gateway.batches.records import (
    BATCH_ID,
    FILE_ID,
    INPUT_PURPOSE,
    Batch,
    BatchRecord,
    FileObject,
    Status,
    new_id,
)
from batchery_producer.gateway.batches.storage import Storage, WrittenFile
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem

#: Maximum characters of a file's name; the rest of a longer one is cut off.
MAX_NAME_CHARS = 255

#: Maximum characters of a folder that is named after its owner.
MAX_OWNER_CHARS = 120

#: Records that are read at a time, where only some of them are wanted.
PAGE = 100

#: Folder of what says which batches are open.
OPEN = "open"

#: How long a new batch may take to be kept, in seconds.
LOST_S = 3600.0

FILE_NOT_FOUND = "file_not_found"


class BatchPlace(NamedTuple):
    """A batch, and whose it is."""

    owner: str
    id: str


def owner_of(caller: Caller) -> str:
    """Whose files a caller has: those of the tenant, so that a new key finds them."""
    kind, name = ("tenant", caller.tenant) if caller.tenant else ("key", caller.name)
    quoted = quote(name, safe="")
    if len(quoted) > MAX_OWNER_CHARS:
        quoted = hashlib.sha256(name.encode()).hexdigest()
    return f"{kind}-{quoted}"


class FileStore:
    """The files."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    async def upload(
        self, owner: str, filename: str, chunks: AsyncIterator[bytes], expires_s: int | None
    ) -> FileObject:
        """Keeps an uploaded file; holds a part of it in memory at a time.

        Raises:
            Problem: It is empty.
        """
        file_id, size = new_id("file-"), 0
        creating = self.storage.create(_content(owner, file_id))
        file = await run_in_threadpool(creating.__enter__)
        try:
            async for chunk in chunks:
                size += len(chunk)
                await run_in_threadpool(file.write, chunk)
            if not size:
                raise Problem(Kind.EMPTY, "file: empty; send a line at least", param="file")
        except BaseException as error:
            creating.__exit__(type(error), error, error.__traceback__)
            raise
        await run_in_threadpool(creating.__exit__, None, None, None)
        made = self._described(file_id, filename, INPUT_PURPOSE, size, expires_s)
        await run_in_threadpool(self._save, owner, made)
        return made

    @contextmanager
    def writing(
        self, owner: str, file_id: str, filename: str, purpose: str, expires_s: int | None
    ) -> Iterator[WrittenFile]:
        """A file to be written; it is there when the block ends without an error."""
        with self.storage.create(_content(owner, file_id)) as file:
            yield file
            size = file.tell()
        self._save(owner, self._described(file_id, filename, purpose, size, expires_s))

    def get(self, owner: str, file_id: str) -> FileObject:
        """A file.

        Raises:
            Problem: There is none, or its time is over.
        """
        found = None
        if re.fullmatch(FILE_ID, file_id):
            content = self.storage.read(_file(owner, file_id))
            found = None if content is None else FileObject.model_validate_json(content)
        if found is None or self._is_over(owner, found):
            raise _no_file(file_id)
        return found

    def page(
        self, owner: str, after: str | None, limit: int, *, newest_first: bool, purpose: str | None
    ) -> tuple[Sequence[FileObject], bool]:
        """Some files, and whether there are more."""
        folder = f"{owner}/files"
        ids = _ids(self.storage.names(folder))
        found: list[FileObject] = []
        rest = _rest(ids, after, newest_first=newest_first)
        for start in range(0, len(rest), PAGE):
            names = [f"{folder}/{each}.json" for each in rest[start : start + PAGE]]
            for content in self.storage.read_many(names):
                file = FileObject.model_validate_json(content)
                if purpose in (None, file.purpose) and not self._is_over(owner, file):
                    found.append(file)
            if len(found) > limit:
                break
        return found[:limit], len(found) > limit

    def url(self, owner: str, file_id: str) -> str:
        """Where the content of a file is."""
        return self.storage.url_of(_content(owner, file_id))

    def open(self, owner: str, file_id: str) -> BinaryIO:
        """Opens a file.

        Raises:
            Problem: There is none.
        """
        self.get(owner, file_id)
        opened = self.storage.open(_content(owner, file_id))
        if opened is None:
            raise _no_file(file_id)
        return opened

    def delete(self, owner: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            Problem: There is none.
        """
        self.get(owner, file_id)
        self._remove(owner, file_id)

    def _described(
        self, file_id: str, filename: str, purpose: str, size: int, expires_s: int | None
    ) -> FileObject:
        now_s = int(time.time())
        return FileObject(
            id=file_id,
            bytes=size,
            created_at=now_s,
            filename=filename[:MAX_NAME_CHARS],
            purpose=purpose,
            expires_at=None if expires_s is None else now_s + expires_s,
        )

    def _save(self, owner: str, file: FileObject) -> None:
        self.storage.write(_file(owner, file.id), file.model_dump_json().encode())

    def _is_over(self, owner: str, file: FileObject) -> bool:
        """Whether its time is over; then it is removed."""
        is_over = file.expires_at is not None and time.time() >= file.expires_at
        if is_over:
            self._remove(owner, file.id)
        return is_over

    def _remove(self, owner: str, file_id: str) -> None:
        self.storage.remove(_file(owner, file_id))
        self.storage.remove(_content(owner, file_id))


class BatchStore:
    """The batches."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def add(self, record: BatchRecord) -> None:
        """Keeps a new batch, which is open."""
        # This first: a batch that is kept and not open would never run.
        self.storage.write(f"{OPEN}/{record.owner},{record.id}", b"{}")
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        """Keeps what has become of a batch; for the holder of its lease."""
        self.storage.write(_batch(record.owner, record.id), record.model_dump_json().encode())

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch.

        Raises:
            Problem: There is none.
        """
        content = None
        if re.fullmatch(BATCH_ID, batch_id):
            content = self.storage.read(_batch(owner, batch_id))
        if content is None:
            raise Problem(Kind.NOT_FOUND, f"batch {batch_id!r:.100}: no such batch", param="id")
        return BatchRecord.model_validate_json(content)

    def seen(self, record: BatchRecord) -> Batch:
        """What clients see of a batch, which may be about to be cancelled."""
        batch = record.batch
        if batch.can_be_cancelled:
            at_s = self.cancelled_at(record)
            if at_s is not None:
                told = {"status": Status.CANCELLING, "cancelling_at": at_s}
                return batch.model_copy(update=told)
        return batch

    def page(self, owner: str, after: str | None, limit: int) -> tuple[Sequence[Batch], bool]:
        """Some batches, the newest first, and whether there are more."""
        folder = f"{owner}/batches"
        rest = _rest(_ids(self.storage.names(folder)), after, newest_first=True)
        names = [f"{folder}/{each}.json" for each in rest[:limit]]
        records = map(BatchRecord.model_validate_json, self.storage.read_many(names))
        return [self.seen(record) for record in records], len(rest) > limit

    def open_batches(self) -> Sequence[BatchPlace]:
        """The batches that are not over, or that were not tidied up."""
        names = (name.partition(",") for name in self.storage.names(OPEN))
        return [BatchPlace(owner, id_) for owner, _, id_ in names if re.fullmatch(BATCH_ID, id_)]

    def forget_lost(self, place: BatchPlace) -> None:
        """Closes a batch that was never kept, as its gateway was killed when it began."""
        made_s = int(place.id.removeprefix("batch_")[:14], 16) / 1e6
        if time.time() - made_s > LOST_S and self.storage.read(_batch(*place)) is None:
            self.storage.remove(f"{OPEN}/{place.owner},{place.id}")

    def uses(self, owner: str, file_id: str) -> str | None:
        """Id of a batch that still reads a file."""
        for place in self.open_batches():
            if place.owner == owner:
                content = self.storage.read(_batch(*place))
                record = BatchRecord.model_validate_json(content) if content else None
                if record and record.batch.input_file_id == file_id and not record.batch.is_over:
                    return place.id
        return None

    def cancel(self, record: BatchRecord) -> None:
        """Has a batch cancelled by whoever runs it."""
        if self.cancelled_at(record) is None:
            self.storage.write(_cancel(record), str(int(time.time())).encode())

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """When a batch was to be cancelled, in seconds; None if it was not."""
        content = self.storage.read(_cancel(record))
        return None if content is None else int(content)

    def pieces(self, record: BatchRecord) -> str:
        """The folder of what has come back."""
        return f"{record.owner}/pieces/{record.id}"

    def close(self, record: BatchRecord) -> None:
        """Tidies up behind a batch that is over."""
        self.storage.remove_folder(self.pieces(record))
        self.storage.remove(_cancel(record))
        self.storage.remove(f"{OPEN}/{record.owner},{record.id}")


def _file(owner: str, file_id: str) -> str:
    return f"{owner}/files/{file_id}.json"


def _content(owner: str, file_id: str) -> str:
    return f"{owner}/files/{file_id}.jsonl"


def _batch(owner: str, batch_id: str) -> str:
    return f"{owner}/batches/{batch_id}.json"


def _cancel(record: BatchRecord) -> str:
    return f"{record.owner}/batches/{record.id}.cancel"


def _ids(names: Sequence[str]) -> list[str]:
    return [name.removesuffix(".json") for name in names if name.endswith(".json")]


def _rest(ids: list[str], after: str | None, *, newest_first: bool) -> list[str]:
    """The ids that come after one, which need not be there any more; they sort by time."""
    if newest_first:
        return ids[: bisect_left(ids, after) if after else None][::-1]
    return ids[bisect_right(ids, after) if after else 0 :]


def _no_file(file_id: str) -> Problem:
    return Problem(
        Kind.NOT_FOUND, f"file {file_id!r:.100}: no such file", code=FILE_NOT_FOUND, param="id"
    )
