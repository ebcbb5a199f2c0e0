"""Batches of the gateway's callers: their records in Redis, what they compute in a store.

    batch:ID         the record, the number of its turn, and who has that turn
    batches:OWNER    ids of an owner's batches
    open:OWNER       those of them that are not over
    pieces:ID        names and bytes of its pieces, in the store's folder OWNER/pieces/ID

A turn is a job of the queue. Whoever begins it writes a token into the batch, and can save as long
as the token is there: a process that comes late spoils nothing.
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from batchery.errors import BatcheryError
from batchery_producer.gateway.batches.files import FileStore
from batchery_producer.gateway.batches.records import (
    BATCH_ID,
    BatchObject,
    BatchRecord,
    FileObject,
    Status,
)
from batchery_producer.gateway.job_queue import BATCH, LOST_S, JobQueue
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

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
        """Keeps what has become of a batch, and makes files known; all of it or nothing.

        Raises:
            Superseded: Another attempt has the turn.
        """
        encoded = [json.dumps(piece) for piece in pieces]
        published = [part for each in files for part in self._files.publishing(record.owner, each)]
        self._save(record, turn, record.model_dump_json(), [len(encoded), *encoded, *published])

    def touch(self, record: BatchRecord, turn: Turn) -> None:
        """Shows that a turn goes on.

        Raises:
            Superseded: Another attempt has the turn.
        """
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

    def page(self, owner: str, after: str | None, limit: int) -> tuple[Sequence[BatchObject], bool]:
        """Some batches, the newest first, and whether there are more."""
        key = self._store.key("batches", owner)
        start = f"({after}" if after else "+"
        found = self._store.call(
            lambda client: client.zrevrangebylex(key, start, "-", 0, limit + 1)
        )
        records = self._read([each.decode() for each in found[:limit]])
        return [each.batch for each in records], len(found) > limit

    def _read(self, ids: Sequence[str]) -> list[BatchRecord]:
        def read(client: Any) -> list[list[bytes | None]]:
            with client.pipeline(transaction=False) as pipe:
                for each in ids:
                    pipe.hmget(self._key(each), "record", "cancelled_at")
                found: list[list[bytes | None]] = pipe.execute()
            return found

        return [
            _seen(BatchRecord.model_validate_json(text), at)
            for text, at in self._store.call(read)
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

    def cancel(self, record: BatchRecord) -> None:
        """Has a batch cancelled by whoever has its turn."""
        now_s, key = int(time.time()), self._key(record.id)
        self._store.call(lambda client: client.hsetnx(key, "cancelled_at", now_s))

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

        def forget(client: Any) -> None:
            with client.pipeline() as pipe:
                pipe.zrem(self._jobs.due_key, build_work_name(record))
                pipe.srem(self._store.key("open", record.owner), record.id)
                pipe.delete(self._pieces_key(record.id))
                member = f"{record.owner}/{record.id}"
                pipe.zadd(self._files.removals_key, {member: time.time() + KEPT_S})
                pipe.execute()

        self._store.call(forget)

    def remove(self, owner: str, batch_id: str) -> None:
        """Forgets a batch, and what a late process may have left of it."""
        self._files.storage.remove_folder(build_folder_name(owner, batch_id))

        def forget(client: Any) -> None:
            with client.pipeline() as pipe:
                pipe.zrem(self._store.key("batches", owner), batch_id)
                pipe.delete(self._key(batch_id))
                pipe.zrem(self._files.removals_key, f"{owner}/{batch_id}")
                pipe.execute()

        self._store.call(forget)

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
