"""Batches of the gateway's callers: their records in Redis, what they compute in a store.

    batch:ID         the record, the number of its turn, and who has that turn
    batches:OWNER    ids of an owner's batches
    open:OWNER       those of them that are not over
    pieces:ID        names and bytes of its pieces, in the store's folder OWNER/pieces/ID

A turn is a job of the queue. Whoever begins it writes a token into the batch, and can save as long
as the token is there: a process that comes late spoils nothing.
"""

import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
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
from batchery_producer.gateway.store import BATCH, LOST_S, JobQueue, Store

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


#: Statuses that a batch can have next; those without any are final.
NEXT: dict[Status, tuple[Status, ...]] = {
    Status.VALIDATING: (Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING),
    Status.IN_PROGRESS: (Status.FINALIZING, Status.FAILED, Status.CANCELLING),
    Status.FINALIZING: (Status.COMPLETED, Status.EXPIRED, Status.FAILED),
    Status.CANCELLING: (Status.CANCELLED,),
    Status.FAILED: (),
    Status.COMPLETED: (),
    Status.EXPIRED: (),
    Status.CANCELLED: (),
}


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

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return not NEXT[self.status]

    @property
    def can_be_cancelled(self) -> bool:
        """Whether it is still time."""
        return Status.CANCELLING in NEXT[self.status] or self.status is Status.CANCELLING

    def moved(self, status: Status, at_s: float, **changes: Any) -> "BatchObject":
        """The batch in its next status.

        Raises:
            ValueError: It cannot have this status next.
        """
        if status not in NEXT[self.status]:
            raise ValueError(f"a batch that is {self.status} cannot become {status}")
        return self.model_copy(
            update={"status": status, f"{status.value}_at": int(at_s), **changes}
        )


class Slice(NamedTuple):
    """Where a part of a file begins: some requests, so few that a turn reads them in no time.

    Attributes:
        offset: Bytes of the file before it.
        lines: Lines of the file before it.
    """

    offset: int
    lines: int


Kept = TypeVar("Kept", FileObject, BatchObject)


class ObjectPage(BaseModel, Generic[Kept]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[Kept]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: list[Kept], *, has_more: bool) -> Self:
        """The page with these."""
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first_id, last_id=last_id, has_more=has_more)


class BatchRecord(BaseModel):
    """What is kept of a batch.

    Attributes:
        batch: What clients see.
        owner: Whose it is.
        tenant: For whom its jobs run; None for nobody in particular.
        priority: Celery's priority of its jobs.
        run: Random digits, of which the ids of its jobs are made.
        max_items: Items of one request.
        max_chars: Characters of all texts of one request.
        output_expires_s: How long its files are kept, in seconds; None for ever.
        slices: The parts of its file.
        ended_slices: How many of these have ended.
        ended_lines: Lines of later slices that have ended.
        sending: How many slices an attempt has begun to send.
        sent: How many slices were sent.
        progress_at: When the last result came, in Unix seconds.
        ending: Status that a batch which is finalizing will have; None before.
    """

    model_config = ConfigDict(frozen=True)

    batch: BatchObject
    owner: str
    tenant: str | None
    priority: int
    run: str
    max_items: int
    max_chars: int
    output_expires_s: int | None = None
    slices: list[Slice] = []
    ended_slices: int = 0
    ended_lines: list[int] = []
    sending: int = 0
    sent: int = 0
    progress_at: float = 0.0
    ending: Status | None = None

    @property
    def id(self) -> str:
        """Its id."""
        return self.batch.id

    def with_batch(self, batch: BatchObject) -> "BatchRecord":
        """The record, with what clients see now."""
        return self.model_copy(update={"batch": batch})


# Turns, and what they save


#: How long a batch is known after its end, in seconds.
KEPT_S = 30 * 86_400.0


class Superseded(BatcheryError):
    """Another attempt has the turn of a batch, so this one changes nothing more."""


class Turn(NamedTuple):
    """The right to save a batch.

    Attributes:
        number: How many turns came before.
        token: What the batch has, too, as long as nobody else has begun.
    """

    number: int
    token: str


class Piece(NamedTuple):
    """Lines of the output or error file, in a file of the store.

    Attributes:
        name: In the folder of the batch's pieces; begins with the kind, `output` or `error`.
        bytes: How long it is.
    """

    name: str
    bytes: int


class BatchStore:
    """The batches."""

    def __init__(self, store: Store, files: FileStore, jobs: JobQueue) -> None:
        self._store = store
        self._files = files
        self._jobs = jobs

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
        owner = get_owner(caller)
        file = self._files.get(owner, input_file_id)
        if file.purpose != INPUT_PURPOSE:
            raise Problem(
                Kind.INVALID,
                f"file {file.id}: its purpose is {file.purpose}, and must be {INPUT_PURPOSE}",
                param="input_file_id",
            )
        now_s = int(time.time())
        if file.expires_at is not None and file.expires_at < now_s + window_s:
            raise Problem(
                Kind.INVALID,
                f"file {file.id} expires before the completion window of the batch is over;"
                " give the file more time, or the batch less",
                param="input_file_id",
            )
        record = BatchRecord(
            batch=BatchObject(
                id=new_id("batch_"),
                input_file_id=file.id,
                created_at=now_s,
                expires_at=now_s + window_s,
                **said,
            ),
            owner=owner,
            tenant=caller.tenant,
            priority=priority if caller.priority is None else caller.priority,
            run=secrets.token_hex(8),
            max_items=caller.max_items,
            max_chars=caller.max_chars,
            output_expires_s=expires_s,
        )
        self.add(record, caller.max_open_batches)
        try:
            self._jobs.send(build_work_name(record), 0, tenant=record.tenant)
        except OperationalError as error:
            logger.warning("batch %s: begins as soon as the broker is back: %s", record.id, error)
        return record.batch

    def add(self, record: BatchRecord, max_open: int) -> None:
        """Keeps a new batch, which is open.

        Raises:
            Problem: Its owner has too many open ones.
        """
        owner, id_ = record.owner, record.id
        keys = [
            self._key(id_),
            self._store.key("batches", owner),
            self._store.key("open", owner),
            self._jobs.due_key,
        ]
        text, due_s = record.model_dump_json(), time.time() + LOST_S
        if not self._store.script(
            "add_batch", keys, max_open, id_, owner, text, build_work_name(record), due_s
        ):
            raise Problem(
                Kind.OVERLOADED,
                f"{max_open} batches are open, and gateway.max_open_batches allows no more;"
                " wait for one of them to end",
                retry_after_s=60,
            )

    def begin(self, batch_id: str, number: int) -> tuple[BatchRecord, Turn] | None:
        """Begins a turn; None if it is over.

        Args:
            batch_id: The batch.
            number: Of the turn; -1 for the next one.
        """
        token = secrets.token_hex(8)
        work, due_s = f"{BATCH} {batch_id}", time.time() + LOST_S
        keys = [self._key(batch_id), self._jobs.due_key]
        found = self._store.script("claim_batch", keys, number, token, work, due_s)
        if not found:
            return None
        return BatchRecord.model_validate_json(found[0]), Turn(int(found[1]), token)

    def save(
        self,
        record: BatchRecord,
        turn: Turn,
        *,
        pieces: Sequence[Piece] = (),
        files: Sequence[FileObject] = (),
    ) -> None:
        """Keeps what has become of a batch, and makes files known; all of it or nothing."""
        encoded = [json.dumps(piece) for piece in pieces]
        published = [part for each in files for part in self._files.publishing(record.owner, each)]
        self._save(record, turn, record.model_dump_json(), [len(encoded), *encoded, *published])

    def touch(self, record: BatchRecord, turn: Turn) -> None:
        """Shows that a turn goes on."""
        self._save(record, turn, "", [0])

    def _save(self, record: BatchRecord, turn: Turn, text: str, rest: Sequence[Any]) -> None:
        keys = [
            self._key(record.id),
            self._jobs.due_key,
            self._pieces_key(record.id),
            self._files.get_key(record.owner),
            self._files.removals_key,
        ]
        due_s = time.time() + LOST_S
        head = (turn.token, build_work_name(record), due_s, text, turn.number)
        if not self._store.script("save_batch", keys, *head, *rest):
            raise Superseded(f"batch {record.id}: another attempt goes on with it")

    def get(self, owner: str, batch_id: str) -> BatchRecord:
        """A batch, as clients see it: it may be about to be cancelled.

        Raises:
            Problem: There is none.
        """
        records = self._read([batch_id]) if re.fullmatch(BATCH_ID, batch_id) else []
        if not records or records[0].owner != owner:
            raise Problem(Kind.NOT_FOUND, f"batch {batch_id!r:.100}: no such batch", param="id")
        return records[0]

    def page(self, owner: str, after: str | None, limit: int) -> tuple[list[BatchObject], bool]:
        """Some batches, the newest first, and whether there are more."""
        key = self._store.key("batches", owner)
        start = f"({after}" if after else "+"
        found = self._store.call(
            lambda client: client.zrevrangebylex(key, start, "-", 0, limit + 1)
        )
        records = self._read([each.decode() for each in found[:limit]])
        return [each.batch for each in records], len(found) > limit

    def _read(self, ids: Sequence[str]) -> list[BatchRecord]:
        with self._store.client() as client, client.pipeline(transaction=False) as pipe:
            for each in ids:
                pipe.hmget(self._key(each), "record", "cancelled_at")
            found: list[list[bytes | None]] = pipe.execute()
        return [
            _seen(BatchRecord.model_validate_json(text), at)
            for text, at in found
            if text is not None
        ]

    def uses(self, owner: str, file_id: str) -> str | None:
        """Id of a batch that still reads a file."""
        key = self._store.key("open", owner)
        ids = [each.decode() for each in self._store.call(lambda client: client.smembers(key))]
        for record in self._read(ids):
            if record.batch.input_file_id == file_id and not record.batch.is_over:
                return record.id
        return None

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Has a batch cancelled by whoever has its turn; what has come back by then is kept.

        Raises:
            Problem: There is no such batch, or it is too late.
        """
        batch = self.get(owner, batch_id).batch
        if not batch.can_be_cancelled:
            raise Problem(
                Kind.CONFLICT, f"batch {batch_id} is {batch.status}: too late to cancel it"
            )
        now_s, key = int(time.time()), self._key(batch_id)
        self._store.call(lambda client: client.hsetnx(key, "cancelled_at", now_s))
        return self.get(owner, batch_id).batch

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

    def cancelled_at(self, record: BatchRecord) -> int | None:
        """When a batch was to be cancelled, in seconds; None if it was not."""
        key = self._key(record.id)
        found = self._store.call(lambda client: client.hget(key, "cancelled_at"))
        return None if found is None else int(found)

    def pieces(self, record: BatchRecord) -> list[Piece]:
        """What has come back, in the order in which it did."""
        key = self._pieces_key(record.id)
        found = self._store.call(lambda client: client.lrange(key, 0, -1))
        return [Piece(*json.loads(each)) for each in found]

    def close(self, record: BatchRecord) -> None:
        """Tidies up behind a batch that is over."""
        self._files.storage.remove_folder(build_folder_name(record.owner, record.id))
        with self._store.client() as client, client.pipeline() as pipe:
            pipe.zrem(self._jobs.due_key, build_work_name(record))
            pipe.srem(self._store.key("open", record.owner), record.id)
            pipe.delete(self._pieces_key(record.id))
            member = f"{record.owner}/{record.id}"
            pipe.zadd(self._files.removals_key, {member: time.time() + KEPT_S})
            pipe.execute()

    def remove(self, owner: str, batch_id: str) -> None:
        """Forgets a batch, and what a late process may have left of it."""
        self._files.storage.remove_folder(build_folder_name(owner, batch_id))
        with self._store.client() as client, client.pipeline() as pipe:
            pipe.zrem(self._store.key("batches", owner), batch_id)
            pipe.delete(self._key(batch_id))
            pipe.zrem(self._files.removals_key, f"{owner}/{batch_id}")
            pipe.execute()

    def _key(self, batch_id: str) -> bytes:
        return self._store.key("batch", batch_id)

    def _pieces_key(self, batch_id: str) -> bytes:
        return self._store.key("pieces", batch_id)


def build_work_name(record: BatchRecord) -> str:
    """The work of a batch, for the queue."""
    return f"{BATCH} {record.id}"


def build_folder_name(owner: str, batch_id: str) -> str:
    """The folder of a batch's pieces."""
    return f"{owner}/pieces/{batch_id}"


def _seen(record: BatchRecord, cancelled_at: bytes | None) -> BatchRecord:
    batch = record.batch
    if cancelled_at is None or not batch.can_be_cancelled:
        return record
    changes = {"status": Status.CANCELLING, "cancelling_at": int(cancelled_at)}
    return record.with_batch(batch.model_copy(update=changes))
