"""Batches of the gateway's callers: what clients see of them, and what is kept of each in Redis."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from batchery_producer.gateway.batches.files import (
    INPUT_PURPOSE,
    OUTPUT_PURPOSE,
    FileObject,
    FileRecord,
    FileStore,
    describe_file,
    get_owner,
    new_id,
)
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

logger = logging.getLogger(__name__)

# Batches as OpenAI's clients see them


BATCH_ID = r"batch_[0-9a-f]{46}"

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
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


# What else is kept of one


class Slice(NamedTuple):
    """Where a part of a file begins: some hundred requests, whose answers are written together.

    Attributes:
        offset: Bytes of the file before it.
        lines: Lines of the file before it.
    """

    offset: int
    lines: int


class SliceState(BaseModel):
    """How far a slice is; once it has ended, where its answers are.

    Attributes:
        completed: Requests that have an answer.
        failed: Requests that have an error.
        expired: Those of them that had no time.
        input_tokens: Tokens that were read.
        output_tokens: Tokens that were written.
        name: Name of its part of the output file, and of the error file.
        output_bytes: How long the answers are.
        error_bytes: How long the errors are.
    """

    completed: int = 0
    failed: int = 0
    expired: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    name: str = ""
    output_bytes: int = 0
    error_bytes: int = 0


class BatchRecord(BatchObject):
    """What is kept of a batch, besides what clients see.

    Attributes:
        owner: Whose it is.
        tenant: For whom its jobs run; None for nobody in particular.
        priority: Celery's priority of its jobs.
        max_items: Items of one request.
        max_chars: Characters of all texts of one request.
        made_files: Ids of the output file and the error file, which nobody knows before its end.
        slices: The parts of its file.
        ends: How those slices have ended that have, by number.
    """

    model_config = ConfigDict(frozen=True)

    owner: str
    tenant: str | None
    priority: int
    max_items: int
    max_chars: int
    made_files: dict[str, str]
    slices: list[Slice] = []
    ends: dict[int, SliceState] = {}

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in OVER

    @property
    def is_running(self) -> bool:
        """Whether its requests are to be sent and awaited: it is not cancelled, and has time."""
        return self.status is Status.IN_PROGRESS and time.time() < self.expires_at

    def moved(self, status: Status, **changes: Any) -> Self:
        """The batch in another status, with other changes."""
        at = {f"{status.value}_at": getattr(self, f"{status.value}_at", None) or int(time.time())}
        return self.model_copy(update={**changes, **at, "status": status})

    def counted(self, running: Mapping[int, SliceState]) -> Self:
        """The batch with the figures of the slices that have ended, and of those that run."""
        states = [*self.ends.values()]
        states += [state for number, state in running.items() if number not in self.ends]
        completed, failed, read, written = (
            sum(getattr(each, name) for each in states)
            for name in ("completed", "failed", "input_tokens", "output_tokens")
        )
        counts = RequestCounts(total=self.request_counts.total, completed=completed, failed=failed)
        usage = BatchUsage(input_tokens=read, output_tokens=written, total_tokens=read + written)
        return self.model_copy(update={"request_counts": counts, "usage": usage})

    def advanced(self, number: int, state: SliceState) -> Self:
        """The batch with one more slice that has ended; as it is if that had ended before."""
        ends = {number: state, **self.ends}
        return self.model_copy(update={"ends": ends}).counted({})

    def finished(self, errors: Sequence[BatchError]) -> Self:
        """The batch at its end, which has files now, if anything was written."""
        ids = {f"{kind}_file_id": file.id for kind, file in self.list_files().items()}
        if errors:
            return self.moved(Status.FAILED, errors=BatchErrors(data=list(errors)), **ids)
        if self.status is Status.CANCELLING:
            return self.moved(Status.CANCELLED, **ids)
        is_late = any(each.expired for each in self.ends.values())
        ending = Status.EXPIRED if is_late else Status.COMPLETED
        return self.moved(Status.FINALIZING).moved(ending, **ids)

    def list_files(self) -> dict[str, FileRecord]:
        """The files of what was written so far."""
        found = {}
        for kind, file_id in self.made_files.items():
            ends = [self.ends[number] for number in sorted(self.ends)]
            sizes = {each.name: getattr(each, f"{kind}_bytes") for each in ends}
            parts = [name for name, size in sizes.items() if size]
            if parts:
                found[kind] = describe_file(
                    file_id,
                    f"{self.id}_{kind}.jsonl",
                    OUTPUT_PURPOSE,
                    sum(sizes.values()),
                    parts,
                )
        return found


# Where they are kept


#: How long a batch is known after its end, in seconds; and for how long at the longest.
KEPT_S = 30 * 86_400
LONGEST_S = 2 * KEPT_S

#: After so long without a sign of life, in seconds, a batch is taken up by another worker.
LIFE_S = 60


class BatchStore:
    """The batches: their records in Redis.

    batch:ID         the record
    running:ID       there while a worker runs it
    batches:OWNER    ZSET: ids of an owner's batches
    open:OWNER       SET: ids of those of them that are not over
    open             ZSET: OWNER/ID of all that are not over, by their age
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
        priority: int,
        **said: Any,
    ) -> BatchObject:
        """Begins a batch.

        Args:
            caller: Whose it is.
            input_file_id: Its file.
            window_s: How much time it has, in seconds.
            priority: Of its jobs, unless the caller's key says otherwise.
            said: What the caller says of it, as it is shown.

        Raises:
            Problem: There is no such file for batches, or the caller has too many open ones.
        """
        owner, now_s = get_owner(caller), int(time.time())
        file = self._files.get(owner, input_file_id)
        if file.purpose != INPUT_PURPOSE:
            text = f"file {file.id}: its purpose is {file.purpose}, and must be {INPUT_PURPOSE}"
            raise Problem(Kind.INVALID, text, param="input_file_id")
        record = BatchRecord(
            id=new_id("batch_"),
            input_file_id=file.id,
            created_at=now_s,
            expires_at=now_s + window_s,
            owner=owner,
            tenant=caller.tenant,
            priority=priority if caller.priority is None else caller.priority,
            max_items=caller.max_items,
            max_chars=caller.max_chars,
            made_files={"output": new_id("file-"), "error": new_id("file-")},
            **said,
        )
        self._add(record, caller.max_open_batches)
        return record

    def _add(self, record: BatchRecord, max_open: int) -> None:
        open_key = self._store.key("open", record.owner)
        ids_key = self._store.key("batches", record.owner)

        def add(pipe: Any) -> None:
            if pipe.scard(open_key) >= max_open:
                raise Problem(
                    Kind.OVERLOADED,
                    f"{max_open} batches are open, and gateway.max_open_batches allows no more;"
                    " wait for one of them to end",
                    retry_after_s=60,
                )
            pipe.multi()
            pipe.set(self._key(record.id), record.model_dump_json())
            pipe.sadd(open_key, record.id)
            pipe.zadd(self._open_key, {f"{record.owner}/{record.id}": record.created_at})
            # Ids begin with the time in microseconds.
            oldest = f"(batch_{int((time.time() - LONGEST_S) * 1e6):014x}"
            pipe.zremrangebylex(ids_key, "-", oldest)
            pipe.zadd(ids_key, {record.id: 0})
            pipe.expire(ids_key, LONGEST_S)

        self._store.call(lambda client: client.transaction(add, open_key))

    def change(self, batch_id: str, make: Callable[[BatchRecord], BatchRecord]) -> BatchRecord:
        """Keeps what a function makes of a batch; with its end, its files become known.

        Args:
            batch_id: A batch; one that is over stays as it is.
            make: Gets the batch as it is, and may be called again where others change it, too.

        Returns:
            The batch as it is now.
        """
        key = self._key(batch_id)

        def save(pipe: Any) -> BatchRecord:
            record = BatchRecord.model_validate_json(pipe.get(key))
            if record.is_over:
                return record
            made = make(record)
            pipe.multi()
            pipe.set(key, made.model_dump_json(), ex=KEPT_S if made.is_over else None)
            if made.is_over:
                logger.info("batch %s: %s", batch_id, made.status)
                for file in made.list_files().values():
                    self._files.publish(pipe, made.owner, file)
                pipe.zrem(self._open_key, f"{made.owner}/{batch_id}")
                pipe.srem(self._store.key("open", made.owner), batch_id)
            return made

        found: BatchRecord = self._store.call(
            lambda client: client.transaction(save, key, value_from_callable=True)
        )
        return found

    def load(self, batch_id: str) -> BatchRecord | None:
        """A batch; None if there is none."""
        return self._read([batch_id])[0]

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
        # Some may be so old that they are gone.
        records = [each for each in self._read([id_.decode() for id_ in found]) if each]
        return records[:limit], len(found) > limit

    def _read(self, ids: Sequence[str]) -> list[BatchRecord | None]:
        keys = [self._key(each) for each in ids]
        found = self._store.call(lambda client: client.mget(keys)) if keys else []
        return [None if each is None else BatchRecord.model_validate_json(each) for each in found]

    def cancel(self, owner: str, batch_id: str) -> BatchObject:
        """Has a batch cancelled; what has come back by then is kept.

        Raises:
            Problem: There is no such batch, or it is too late.
        """
        self.get(owner, batch_id)
        stoppable = (Status.VALIDATING, Status.IN_PROGRESS)
        record = self.change(
            batch_id,
            lambda now: now.moved(Status.CANCELLING) if now.status in stoppable else now,
        )
        if record.status is not Status.CANCELLING:
            text = f"batch {batch_id} is {record.status}: too late to cancel it"
            raise Problem(Kind.CONFLICT, text)
        return self.get(owner, batch_id)

    # Who runs them

    def list_open(self) -> list[tuple[str, str]]:
        """Owners and ids of all batches that are not over, the oldest first."""
        found = self._store.call(lambda client: client.zrange(self._open_key, 0, -1))
        return [(owner, id_) for owner, _, id_ in (each.decode().partition("/") for each in found)]

    def take(self, batch_id: str) -> bool:
        """Takes a batch to run it; returns whether nobody else has."""
        key = self._store.key("running", batch_id)
        return bool(self._store.call(lambda client: client.set(key, b"", nx=True, ex=LIFE_S)))

    def show(self, batch_id: str, running: Mapping[int, SliceState]) -> BatchRecord:
        """Shows how far a batch is that somebody runs; returns it as it is now."""
        key = self._store.key("running", batch_id)
        self._store.call(lambda client: client.expire(key, LIFE_S))
        return self.change(batch_id, lambda now: now.counted(running))

    def leave(self, batch_id: str) -> None:
        """Leaves a batch to others."""
        self._store.call(lambda client: client.delete(self._store.key("running", batch_id)))

    def _key(self, batch_id: str) -> bytes:
        return self._store.key("batch", batch_id)
