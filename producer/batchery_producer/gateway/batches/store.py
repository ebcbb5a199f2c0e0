"""Batches of the gateway's callers: what clients see of them, and what is kept of each in Redis."""

import logging
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeVar

from kombu.exceptions import OperationalError
from pydantic import BaseModel, ConfigDict, Field

from batchery.errors import BatcheryError
from batchery_producer.gateway.batches.files import (
    INPUT_PURPOSE,
    FileObject,
    FileStore,
    get_owner,
    new_id,
)
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import BATCH, Store

# Batches as OpenAI's clients see them, and what else is kept of one


logger = logging.getLogger(__name__)

#: Maximum requests of a batch.
MAX_REQUESTS = 50_000

BATCH_ID = r"batch_[0-9a-f]{46}"

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


class Status(StrEnum):
    """Statuses of a batch."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


#: Statuses of a batch to which nothing more will happen.
OVER = (Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED)


class BatchError(BaseModel):
    """What is wrong with the file of a batch."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


class BatchErrors(BaseModel):
    """All that is wrong with the file of a batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """How far a batch is."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchUsage(BaseModel):
    """Tokens of all requests of a batch that were answered."""

    input_tokens: int = 0
    input_tokens_details: dict[str, int] = {"cached_tokens": 0}
    output_tokens: int = 0
    output_tokens_details: dict[str, int] = {"reasoning_tokens": 0}
    total_tokens: int = 0


class BatchObject(BaseModel):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: Metadata | None = None


class Slice(NamedTuple):
    """Where a part of a file begins: some hundred requests, which one job sends and awaits.

    Attributes:
        offset: Bytes of the file before it.
        lines: Lines of the file before it.
    """

    offset: int
    lines: int


class Piece(NamedTuple):
    """The answers of a slice, in a file of the store.

    Attributes:
        name: In the folder of the batch; whoever writes it makes one up.
        bytes: How long it is.
    """

    name: str
    bytes: int


class SliceEnd(BaseModel):
    """What has become of a slice, by a time in Unix seconds."""

    at_s: float = Field(default_factory=time.time)
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output: Piece | None = None
    errors: Piece | None = None


Kept = TypeVar("Kept", FileObject, BatchObject)


class ObjectPage(BaseModel, Generic[Kept]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[Kept]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[Kept], *, has_more: bool) -> Self:
        """The page with these."""
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=list(data), first_id=first_id, last_id=last_id, has_more=has_more)


class BatchRecord(BatchObject):
    """What is kept of a batch, besides what clients see.

    Attributes:
        owner: Whose it is.
        tenant: For whom its jobs run; None for nobody in particular.
        priority: Celery's priority of its jobs.
        run: Random digits, of which the ids of its jobs are made.
        max_items: Items of one request.
        max_chars: Characters of all texts of one request.
        output_expires_s: How long its files are kept, in seconds; None for ever.
        slices: The parts of its file.
        ends: Those of them whose answers its files have, once it is known.
        ending: Status that it will have when its files are made; None before that is known.
        version: How often it was saved.
    """

    model_config = ConfigDict(frozen=True)

    owner: str
    tenant: str | None
    priority: int
    run: str
    max_items: int
    max_chars: int
    output_expires_s: int | None = None
    slices: list[Slice] = []
    ends: list[SliceEnd] = []
    ending: Status | None = None
    version: int = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in OVER

    @property
    def folder(self) -> str:
        """Where the answers of its slices are in the store of files."""
        return f"{self.owner}/pieces/{self.id}"

    @property
    def member(self) -> str:
        """How lists of all owners name it."""
        return f"{self.owner}/{self.id}"

    def moved(self, status: Status, **changes: Any) -> Self:
        """The batch in another status, with other changes."""
        at = {f"{status.value}_at": getattr(self, f"{status.value}_at", None) or int(time.time())}
        return self.model_copy(update={**changes, **at, "status": status})

    def counted(self, ends: Iterable[SliceEnd]) -> Self:
        """The batch with the counts of some slices."""
        ends = list(ends)
        completed, failed, read, written = (
            sum(getattr(each, name) for each in ends)
            for name in ("completed", "failed", "input_tokens", "output_tokens")
        )
        counts = RequestCounts(total=self.request_counts.total, completed=completed, failed=failed)
        usage = BatchUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)
        return self.model_copy(update={"request_counts": counts, "usage": usage})


# Where they are kept


#: How long a batch is known after its end, in seconds.
KEPT_S = 30 * 86_400.0

#: After so long without a sign of life, in seconds, a batch is taken up again: its message was
#: lost, or whoever ran it was killed between two steps.
LIFE_S = 60.0

#: How many batches are taken up at a time.
MAX_LOST = 100


class Superseded(BatcheryError):
    """Another process has saved the batch, so this one changes nothing."""


class BatchStore:
    """The batches: their records in Redis, the answers of their slices in the store of files.

    batch:ID         HASH: the record, and its version
    slices:ID        HASH: how far each slice is, while the batch is open
    batches:OWNER    ZSET: ids of an owner's batches
    open:OWNER       SET: ids of those of them that are not over
    open             ZSET: all that are not over, by when they are taken up without a sign of life
    """

    def __init__(self, store: Store, files: FileStore) -> None:
        self._store = store
        self._files = files
        self._open_key = store.key("open")

    def create(
        self,
        caller: Caller,
        input_file_id: str,
        window_s: int,
        expires_s: int | None,
        priority: int,
        **said: Any,
    ) -> BatchObject:
        """Begins a batch.

        Args:
            caller: Whose it is.
            input_file_id: Its file.
            window_s: How much time it has, in seconds.
            expires_s: How long its files are kept, in seconds; None for ever.
            priority: Of its jobs, unless the caller's key says otherwise.
            said: What the caller says of it, as it is shown.

        Raises:
            Problem: There is no such file, it will be gone before the batch is over, or the
                caller has too many open batches.
        """
        owner, now_s = get_owner(caller), int(time.time())
        file, wrong = self._files.get(owner, input_file_id), ""
        if file.purpose != INPUT_PURPOSE:
            wrong = f"its purpose is {file.purpose}, and must be {INPUT_PURPOSE}"
        elif file.expires_at is not None and file.expires_at < now_s + window_s:
            wrong = "expires before the completion window of the batch is over"
        if wrong:
            raise Problem(Kind.INVALID, f"file {file.id}: {wrong}", param="input_file_id")
        record = BatchRecord(
            id=new_id("batch_"),
            input_file_id=file.id,
            created_at=now_s,
            expires_at=now_s + window_s,
            owner=owner,
            tenant=caller.tenant,
            priority=priority if caller.priority is None else caller.priority,
            run=secrets.token_hex(8),
            max_items=caller.max_items,
            max_chars=caller.max_chars,
            output_expires_s=expires_s,
            **said,
        )
        self.add(record, caller.max_open_batches)
        self._advance(record)
        return record

    def _advance(self, record: BatchRecord) -> None:
        try:
            self._store.send(BATCH, record.id, tenant=record.tenant)
        except OperationalError as error:
            logger.warning("batch %s: waits until the broker is back: %s", record.id, error)

    def add(self, record: BatchRecord, max_open: int) -> None:
        """Keeps a new batch, which is open.

        Raises:
            Problem: Its owner has too many open ones.
        """
        owner, id_ = record.owner, record.id
        lists = [self._store.key("batches", owner), self._store.key("open", owner)]
        keys = [self._key(id_), *lists, self._open_key]
        args = (max_open, id_, record.model_dump_json(), record.member, time.time() + LIFE_S)
        if not self._store.script("add_batch", keys, *args):
            raise Problem(
                Kind.OVERLOADED,
                f"{max_open} batches are open, and gateway.max_open_batches allows no more;"
                " wait for one of them to end",
                retry_after_s=60,
            )

    def save(self, record: BatchRecord, files: Sequence[FileObject] = ()) -> BatchRecord:
        """Keeps what has become of a batch, and makes files known; all of it or nothing.

        Raises:
            Superseded: Somebody else has saved it meanwhile.
        """
        saved = record.model_copy(update={"version": record.version + 1})
        keys = [self._key(record.id), self._files.get_key(record.owner), self._files.removals_key]
        published = [part for each in files for part in self._files.publishing(record.owner, each)]
        args = (record.version, saved.model_dump_json(), *published)
        if not self._store.script("save_batch", keys, *args):
            raise Superseded(f"batch {record.id}: another process goes on with it")
        logger.info("batch %s: %s", record.id, record.status)
        return saved

    def load(self, batch_id: str) -> BatchRecord | None:
        """A batch, with its counts as they are now; None if there is none."""
        return next(iter(self._read([batch_id])), None)

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch of an owner.

        Raises:
            Problem: There is none.
        """
        record = self.load(batch_id) if re.fullmatch(BATCH_ID, batch_id) else None
        if record is None or record.owner != owner:
            raise Problem(Kind.NOT_FOUND, f"batch {batch_id!r:.100}: no such batch", param="id")
        return record

    def page(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchRecord], bool]:
        """Some batches, the newest first, and whether there are more."""
        key, start = self._store.key("batches", owner), f"({after}" if after else "+"
        found = self._store.call(
            lambda client: client.zrevrangebylex(key, start, "-", 0, limit + 1)
        )
        return self._read([each.decode() for each in found[:limit]]), len(found) > limit

    def _read(self, ids: Sequence[str]) -> list[BatchRecord]:
        with self._store.client() as client, client.pipeline(transaction=False) as pipe:
            for each in ids:
                pipe.hget(self._key(each), "record")
                pipe.hgetall(self._slices_key(each))
            found = pipe.execute()
        records = []
        for text, slices in zip(found[::2], found[1::2], strict=True):
            if text is not None:
                record = BatchRecord.model_validate_json(text)
                ends = {**_read_ends(slices, b"now"), **_read_ends(slices, b"end")}
                is_running = record.status is Status.IN_PROGRESS
                records.append(record.counted(ends.values()) if is_running else record)
        return records

    def uses(self, owner: str, file_id: str) -> str | None:
        """Id of a batch that still reads a file."""
        key = self._store.key("open", owner)
        ids = [each.decode() for each in self._store.call(lambda client: client.smembers(key))]
        for record in self._read(ids):
            if record.input_file_id == file_id and not record.is_over:
                return record.id
        return None

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Has a batch cancelled; what has come back by then is kept.

        Raises:
            Problem: There is no such batch, or it is too late.
        """
        while (record := self.get(owner, batch_id)).status is not Status.CANCELLING:
            if record.status not in (Status.VALIDATING, Status.IN_PROGRESS):
                text = f"batch {batch_id} is {record.status}: too late to cancel it"
                raise Problem(Kind.CONFLICT, text)
            with suppress(Superseded):
                self.save(record.moved(Status.CANCELLING))
        self._advance(record)
        return record

    def delete_file(self, owner: str, file_id: str) -> None:
        """Removes a file.

        Raises:
            Problem: There is none, or a batch still reads it.
        """
        self._files.get(owner, file_id)
        user = self.uses(owner, file_id)
        if user is not None:
            raise Problem(
                Kind.CONFLICT, f"file {file_id}: {user} still reads it; cancel that batch first"
            )
        self._files.remove(owner, file_id)

    # Steps

    @contextmanager
    def attempt(self, record: BatchRecord, step: str) -> Iterator[int]:
        """A step of a batch; says how many attempts at it in a row were killed."""
        key, field = self._slices_key(record.id), f"lost {step}"
        count = self._store.call(lambda client: client.hincrby(key, field, 1))
        self.show_life(record)
        try:
            yield count - 1
        finally:
            self._store.call(lambda client: client.hdel(key, field))

    def show_life(self, record: BatchRecord) -> bool:
        """Shows that somebody is at work on a batch; False if it was saved by somebody else."""
        with self._store.client() as client, client.pipeline(transaction=False) as pipe:
            pipe.zadd(self._open_key, {record.member: time.time() + LIFE_S}, xx=True)
            pipe.hget(self._key(record.id), "version")
            return bool(pipe.execute()[1] == b"%d" % record.version)

    def find_lost(self) -> list[str]:
        """Ids of open batches that have shown no sign of life; they count as taken up."""
        due = self._store.take_due(self._open_key, MAX_LOST, LIFE_S)
        return [each.partition("/")[2] for each in due]

    def ends(self, record: BatchRecord) -> dict[int, SliceEnd]:
        """The slices that have ended, by number."""
        slices = self._store.call(lambda client: client.hgetall(self._slices_key(record.id)))
        return _read_ends(slices, b"end")

    def begins(self, record: BatchRecord, number: int) -> bool:
        """Whether nobody has begun to send a slice before."""
        key, field = self._slices_key(record.id), f"begun {number}"
        return bool(self._store.call(lambda client: client.hsetnx(key, field, b"")))

    def progress(self, record: BatchRecord, number: int) -> SliceEnd | None:
        """How far a slice was when its last result came; None if it was not sent yet."""
        key, field = self._slices_key(record.id), f"now {number}"
        now = self._store.call(lambda client: client.hget(key, field))
        return SliceEnd.model_validate_json(now) if now else None

    def show_progress(self, record: BatchRecord, number: int, now: SliceEnd) -> None:
        """Keeps how far a slice is that was sent."""
        key, text = self._slices_key(record.id), now.model_dump_json()
        self._store.call(lambda client: client.hset(key, f"now {number}", text))

    def end_slice(self, record: BatchRecord, number: int, end: SliceEnd) -> bool:
        """Keeps what has become of a slice; False if somebody else has done so."""
        key, field, text = self._slices_key(record.id), f"end {number}", end.model_dump_json()
        return bool(self._store.call(lambda client: client.hsetnx(key, field, text)))

    def close(self, record: BatchRecord, *, is_forgotten: bool = False) -> None:
        """Tidies up behind a batch that is over; forgets it now, or when its time has come."""
        self._files.storage.remove(record.folder)
        with self._store.client() as client, client.pipeline() as pipe:
            pipe.zrem(self._open_key, record.member)
            pipe.srem(self._store.key("open", record.owner), record.id)
            pipe.delete(self._slices_key(record.id))
            pipe.zadd(self._files.removals_key, {record.member: time.time() + KEPT_S})
            if is_forgotten:
                pipe.zrem(self._store.key("batches", record.owner), record.id)
                pipe.delete(self._key(record.id))
                pipe.zrem(self._files.removals_key, record.member)
            pipe.execute()

    def _key(self, batch_id: str) -> bytes:
        return self._store.key("batch", batch_id)

    def _slices_key(self, batch_id: str) -> bytes:
        return self._store.key("slices", batch_id)


def _read_ends(slices: Mapping[bytes, bytes], kind: bytes) -> dict[int, SliceEnd]:
    return {
        int(number): SliceEnd.model_validate_json(text)
        for field, text in slices.items()
        for name, _, number in [field.partition(b" ")]
        if name == kind
    }
