"""What has come back of a batch so far, in pieces; in the end, its output and error files.

A piece is a file of JSON lines that is written once. It has a name of its own, so a process that
has lost the lease of its batch can spoil nothing: what it wrote is right, and counts once.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from batchery_producer.files.journal import Done
from batchery_producer.files.jsonl import encoded
from batchery_producer.files.openai_batch import EXPIRED, INVALID_LINE
from batchery_producer.files.records import Broken, Record
from batchery_producer.gateway.batches.leases import Lease
from batchery_producer.gateway.batches.storage import Storage

Entry = Mapping[str, Any]

#: Name of the input among those of a run, which has one.
INPUT = "input"

#: Error type of a request whose body is wrong, in place of that of a broken line.
REJECTED = "InvalidItem"

#: Bytes of a piece above which it is written at once.
PIECE_BYTES = 4 * 1024 * 1024


class BatchOutput:
    """Results and failures of a batch; the output of a `FileRun`.

    Attributes:
        done: The lines that have ended.
        is_resumed: Whether an earlier process had begun.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        lease: Lease,
        *,
        is_resumed: bool,
        flushed: Callable[[Done], None] = lambda _: None,
    ) -> None:
        """Reads what earlier processes have left.

        Args:
            storage: Where the pieces are.
            folder: Their folder.
            lease: That of the batch.
            is_resumed: Whether jobs may be in flight already.
            flushed: Called with all lines that have ended, when some were added.
        """
        self.done = Done([INPUT])
        self.is_resumed = is_resumed
        self._storage = storage
        self._folder = folder
        self._lease = lease
        self._flushed = flushed
        self._lines = bytearray()
        self._number = 0
        for _ in self.entries():
            pass

    def entries(self) -> Iterator[Entry]:
        """All that has ended, the first entry of each line."""
        self.flush()
        done = Done([INPUT])
        for name in self._storage.names(self._folder):
            self._number = max(self._number, int(name.partition("-")[0]))
            content = self._storage.read(f"{self._folder}/{name}") or b""
            for line in content.splitlines():
                entry = json.loads(line)
                if done.note(entry):
                    yield entry
        self.done = done

    def missing(self, rows: Iterable[Record | Broken]) -> Iterator[Record | Broken]:
        """Rows of the input that have not ended."""
        return (row for row in rows if (row.source, row.line) not in self.done)

    def result(self, row: Record, result: Any) -> str | None:
        """As `RunOutput.result`."""
        form = {"form": row.form} if row.form else {}
        self._add({"id": row.id, "line": row.line, **form, "result": result})
        return None

    def failure(self, row: Record | Broken, type_: str, message: str) -> None:
        """As `RunOutput.failure`."""
        # All lines are requests, or the batch would not run: it is the body that is wrong.
        error = {"type": REJECTED if type_ == INVALID_LINE else type_, "message": message}
        self._add({"id": row.id, "line": row.line, "error": error})

    def expire(self, rows: Iterable[Record | Broken], message: str) -> None:
        """Has all rows fail that have not ended, as there is no time left."""
        for row in self.missing(rows):
            self.failure(row, EXPIRED, message)

    def line_name(self, row: Record | Broken) -> str:
        """As `RunOutput.line_name`."""
        return f"line {row.line}"

    def flush(self) -> None:
        """Writes what was added.

        Raises:
            LeaseLost: Another process may run the batch.
            DatasetError: It cannot be written.
        """
        if not self._lines:
            return
        self._lease.check()
        name = f"{self._number + 1:08d}-{self._lease.token}.jsonl"
        self._storage.write(f"{self._folder}/{name}", bytes(self._lines))
        self._number += 1
        self._lines.clear()
        self._flushed(self.done)

    def finish(self, *, complete: bool) -> None:  # noqa: ARG002 - the runner counts itself
        """As `RunOutput.finish`."""
        self.flush()

    def _add(self, entry: Entry) -> None:
        if not self.done.note(entry):
            return
        self._lines += encoded(entry) + b"\n"
        if len(self._lines) >= PIECE_BYTES:
            self.flush()
