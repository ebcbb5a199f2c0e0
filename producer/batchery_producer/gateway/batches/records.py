"""Files and batches as OpenAI's clients see them, and what else is kept of a batch."""

import secrets
import time
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

#: Maximum requests of a batch.
MAX_REQUESTS = 50_000

#: Purpose of files that a batch reads, and of those that it writes.
INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

#: How long a caller may have a file kept, in seconds.
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000

FILE_ID = r"file-[0-9a-f]{46}"
BATCH_ID = r"batch_[0-9a-f]{46}"

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]


def new_id(prefix: str) -> str:
    """An id that can't be guessed; those of one prefix sort by the time at which they were made."""
    return f"{prefix}{time.time_ns() // 1000:014x}{secrets.token_hex(16)}"


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

    @classmethod
    def of_input(cls, tokens: int) -> "BatchUsage":
        """Usage of requests whose answers have no tokens."""
        return cls(input_tokens=tokens, total_tokens=tokens)


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
