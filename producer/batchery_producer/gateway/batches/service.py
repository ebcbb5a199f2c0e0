"""What the routes of files and batches ask for."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, Self

from celery import Celery

from batchery.settings import Settings
from batchery_producer.gateway.batches.process import BatchProcess
from batchery_producer.gateway.batches.records import INPUT_PURPOSE, Batch, BatchRecord, new_id
from batchery_producer.gateway.batches.storage import Storage
from batchery_producer.gateway.batches.store import BatchStore, FileStore, owner_of
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.monitoring.health import stop
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.run.options import WINDOW


class BatchService:
    """Files and batches, and the process that runs them while the block lasts."""

    def __init__(self, settings: Settings, load: Callable[[], Celery]) -> None:
        """Touches nothing yet.

        Args:
            settings: The models, the classes of jobs, and where the files are.
            load: Gives the app, in another process; can be pickled.

        Raises:
            DatasetError: There is no such filesystem, or its package is not installed.
        """
        storage = Storage(settings.gateway.files)
        self.files = FileStore(storage)
        self.batches = BatchStore(storage)
        self._process = BatchProcess(load, settings, self.batches)
        # A batch has time, unless its key says otherwise.
        self._priority = max(each.level for each in settings.classes.values())

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.files.storage.remove_torn, time.time())
        self._watching = asyncio.create_task(self._process.watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self._watching)
        await asyncio.to_thread(self._process.close)

    def create(
        self, caller: Caller, input_file_id: str, window_s: int, expires_s: int | None, **said: Any
    ) -> Batch:
        """Begins a batch.

        Args:
            caller: Whose it is.
            input_file_id: Its file.
            window_s: How much time it has, in seconds.
            expires_s: How long its files are kept, in seconds; None for ever.
            said: What the caller says of it, as it is shown.

        Raises:
            Problem: There is no such file, or it will be gone before the batch is over.
        """
        owner = owner_of(caller)
        file = self.files.get(owner, input_file_id)
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
            batch=Batch(
                id=new_id("batch_"),
                input_file_id=file.id,
                created_at=now_s,
                expires_at=now_s + window_s,
                **said,
            ),
            owner=owner,
            tenant=caller.tenant,
            priority=self._priority if caller.priority is None else caller.priority,
            run=secrets.token_hex(8),
            window=WINDOW,
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            output_expires_s=expires_s,
        )
        self.batches.add(record)
        self._process.wake()
        return record.batch

    def cancel(self, caller: Caller, batch_id: str) -> Batch:
        """Has a batch cancelled; what has come back by then is kept.

        Raises:
            Problem: There is no such batch, or it is too late.
        """
        record = self.batches.get(owner_of(caller), batch_id)
        if not record.batch.can_be_cancelled:
            raise Problem(
                Kind.CONFLICT, f"batch {batch_id} is {record.batch.status}: too late to cancel it"
            )
        self.batches.cancel(record)
        self._process.wake()
        return self.batches.seen(record)

    def delete_file(self, caller: Caller, file_id: str) -> None:
        """Removes a file.

        Raises:
            Problem: There is none, or a batch still reads it.
        """
        owner = owner_of(caller)
        self.files.get(owner, file_id)
        user = self.batches.uses(owner, file_id)
        if user is not None:
            raise Problem(
                Kind.CONFLICT, f"file {file_id}: {user} still reads it; cancel that batch first"
            )
        self.files.delete(owner, file_id)
