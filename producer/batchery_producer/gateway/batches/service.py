"""What the routes of files and batches ask for."""

import logging
import secrets
import time
from typing import Any

from kombu.exceptions import OperationalError

from batchery.settings import Settings
from batchery_producer.gateway.batches.files import FileStore, get_owner
from batchery_producer.gateway.batches.records import (
    INPUT_PURPOSE,
    BatchObject,
    BatchRecord,
    new_id,
)
from batchery_producer.gateway.batches.storage import Storage
from batchery_producer.gateway.batches.store import BatchStore, build_work_name
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.job_queue import JobQueue
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import Store

logger = logging.getLogger(__name__)


class BatchService:
    """Files and batches, which jobs of the queue run."""

    def __init__(self, settings: Settings, store: Store, jobs: JobQueue) -> None:
        """Touches nothing yet.

        Args:
            settings: The classes of jobs, and where the files are.
            store: Where the records are.
            jobs: Runs the batches.

        Raises:
            DatasetError: There is no such filesystem, or its package is not installed.
        """
        self.files = FileStore(store, Storage(settings.gateway.files))
        self.batches = BatchStore(store, self.files, jobs)
        self._jobs = jobs
        # A batch has time, unless its key says otherwise.
        self._priority = max(each.level for each in settings.classes.values())

    def create(
        self, caller: Caller, input_file_id: str, window_s: int, expires_s: int | None, **said: Any
    ) -> BatchObject:
        """Begins a batch.

        Args:
            caller: Whose it is.
            input_file_id: Its file.
            window_s: How much time it has, in seconds.
            expires_s: How long its files are kept, in seconds; None for ever.
            said: What the caller says of it, as it is shown.

        Raises:
            Problem: There is no such file, it will be gone before the batch is over, or the
                caller has too many open batches.
        """
        owner = get_owner(caller)
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
            batch=BatchObject(
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
            max_items=caller.max_items,
            max_chars=caller.max_chars,
            output_expires_s=expires_s,
        )
        self.batches.add(record, caller.max_open_batches)
        try:
            self._jobs.send(build_work_name(record), 0, tenant=record.tenant)
        except OperationalError as error:
            logger.warning("batch %s: begins as soon as the broker is back: %s", record.id, error)
        return record.batch

    def cancel(self, caller: Caller, batch_id: str) -> BatchObject:
        """Has a batch cancelled; what has come back by then is kept.

        Raises:
            Problem: There is no such batch, or it is too late.
        """
        record = self.batches.get(get_owner(caller), batch_id)
        if not record.batch.can_be_cancelled:
            raise Problem(
                Kind.CONFLICT, f"batch {batch_id} is {record.batch.status}: too late to cancel it"
            )
        self.batches.cancel(record)
        return self.batches.get(record.owner, batch_id).batch

    def delete_file(self, caller: Caller, file_id: str) -> None:
        """Removes a file.

        Raises:
            Problem: There is none, or a batch still reads it.
        """
        owner = get_owner(caller)
        self.files.get(owner, file_id)
        user = self.batches.uses(owner, file_id)
        if user is not None:
            raise Problem(
                Kind.CONFLICT, f"file {file_id}: {user} still reads it; cancel that batch first"
            )
        self.files.remove(owner, file_id)
