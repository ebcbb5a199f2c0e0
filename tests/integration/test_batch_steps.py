"""Attempts at a batch, in a real Redis: what late, doubled and killed ones do to its files."""

import base64
import io
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, states

from batchery.errors import DatasetError
from batchery_producer.gateway import jobs
from batchery_producer.gateway.batches import files as stored_files
from batchery_producer.gateway.batches import run as steps
from batchery_producer.gateway.batches import store as stored_batches
from batchery_producer.gateway.batches.files import FileObject
from batchery_producer.gateway.batches.requests import read_slice
from batchery_producer.gateway.batches.run import BatchRun
from batchery_producer.gateway.batches.store import BatchRecord, Status
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.store import BATCH
from support.harness import wait_for
from support.patience import patient

OWNER = "tenant-acme"
CALLER = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100_000, max_open_batches=3)
SMALL = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100)

#: Two numbers in base64, as workers of ours store them.
VECTOR = base64.b64encode(struct.pack("<2f", 1, 2)).decode()

TEXTS = tuple("x" * number for number in range(1, 7))
SLICES = range(3)


class Room:
    """The files and batches of one process. Nobody runs its jobs, but for the test."""

    def __init__(self, url: str, folder: Path) -> None:
        self.app = Celery("steps", broker=url, backend=url, set_as_current=False)
        self.app.conf.update(
            batchery_gateway={"files": str(folder)},
            batchery_models={"embed": {"kind": "embedding", "model": "none"}},
        )
        self.folder = folder
        self.context = jobs.get_context(self.app)
        self.files, self.batches = self.context.files, self.context.batches

    def upload(self, content: bytes, caller: Caller = CALLER) -> FileObject:
        file = io.BytesIO(content)
        return self.files.upload(caller, "a.jsonl", file, len(content))

    def create(self, *texts: str) -> str:
        """A batch with a request for each text; returns its id."""
        rows = [
            {
                "custom_id": f"r-{number}",
                "url": "/v1/embeddings",
                "body": {"model": "embed", "input": text},
            }
            for number, text in enumerate(texts)
        ]
        file = self.upload("\n".join(map(json.dumps, rows)).encode())
        said = {"endpoint": "/v1/embeddings", "completion_window": "1h"}
        return self.batches.create(CALLER, file.id, 3600, 6, **said).id

    def begin(self) -> str:
        """A batch of three slices, the jobs of two of which are sent; returns its id."""
        batch_id = self.create(*TEXTS)
        assert self.attempt(batch_id).run() == steps.PAUSE_S
        return batch_id

    def load(self, batch_id: str) -> BatchRecord:
        record = self.batches.load(batch_id)
        assert record is not None
        return record

    def attempt(self, batch_id: str) -> BatchRun:
        return BatchRun(self.context, self.load(batch_id))

    def answer(self, batch_id: str, *slices: int) -> None:
        """Stores results of the jobs of some slices, as a worker does.

        From now on results are awaited, however slow the machine is, as they will be found.
        """
        steps.IDLE_S = steps.ATTEMPT_S = patient(30)
        backend: Any = self.app.backend
        for number in slices:
            for request in read_slice(self.load(batch_id), number, self.files):
                for job_id in request.jobs:
                    result = [{"ok": {"vector": VECTOR, "tokens": 1}}]
                    stored = {"status": states.SUCCESS, "result": result, "task_id": job_id}
                    key = backend.get_key_for_task(job_id)
                    backend.client.set(key, backend.encode(stored))

    def content(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        content = b"".join(self.files.read(OWNER, self.files.get(OWNER, file_id)))
        return list(map(json.loads, content.splitlines()))

    def contents(self) -> list[Path]:
        """What is in the folder of files."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture
def room(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    # Two requests in a slice, and nobody waits for those that nobody computes.
    monkeypatch.setattr("batchery_producer.gateway.batches.requests.SLICE_JOBS", 2)
    monkeypatch.setattr(steps, "IDLE_S", 0.01)
    monkeypatch.setattr(steps, "ATTEMPT_S", 0.01)
    monkeypatch.setattr(steps, "COLLECT_S", 0.01)
    return Room(url, tmp_path / "files")


def check_whole(room: Room, batch_id: str) -> None:
    record = room.load(batch_id)
    assert (record.status, record.request_counts.completed) == (Status.COMPLETED, len(TEXTS))
    lines = room.content(record.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r-{n}" for n in range(len(TEXTS))]
    found, _ = room.files.page(OWNER, None, 10, newest_first=True, purpose="batch_output")
    assert [each.id for each in found] == [record.output_file_id]
    assert found[0].bytes == sum(map(len, room.files.read(OWNER, found[0])))


def test_doubled_and_late_attempts_leave_each_line_once_and_in_order(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    early = room.attempt(batch_id)
    room.attempt(batch_id).run()
    late = room.attempt(batch_id)
    room.answer(batch_id, *SLICES)
    assert room.attempt(batch_id).run() is None
    assert late.run() is None
    assert early.run() is None
    check_whole(room, batch_id)
    # Nothing is left of what one of them wrote in vain, but in the file's own folder.
    assert {path.parent.name for path in room.contents()} == {
        room.load(batch_id).input_file_id,
        room.load(batch_id).output_file_id,
    }


def test_two_that_write_a_slice_at_once_write_it_once(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = room.begin()
    room.answer(batch_id, *SLICES)
    write = room.files.storage.write

    def write_and_be_slow(*arguments: Any) -> int:
        size = write(*arguments)
        monkeypatch.undo()
        assert room.attempt(batch_id).run() is None
        return size

    monkeypatch.setattr(room.files.storage, "write", write_and_be_slow)
    assert room.attempt(batch_id).run() is None
    check_whole(room, batch_id)


def test_slice_that_could_not_be_written_is_written_by_the_next_attempt(room: Room) -> None:
    batch_id = room.begin()
    room.answer(batch_id, *SLICES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.files.storage, "write", fail)
        with pytest.raises(DatasetError):
            room.attempt(batch_id).run()
    assert room.attempt(batch_id).run() is None
    check_whole(room, batch_id)


def fail(*_: Any) -> None:
    raise DatasetError("the disk is full")


def check_failed(room: Room, batch_id: str, code: str) -> BatchRecord:
    record = room.load(batch_id)
    assert record.status is Status.FAILED
    assert record.errors is not None
    assert [each.code for each in record.errors.data] == [code]
    return record


def expire(room: Room, batch_id: str) -> None:
    room.batches.change(batch_id, lambda now: now.model_copy(update={"expires_at": 0}))


def cancel(room: Room, batch_id: str) -> None:
    seen = room.batches.cancel(OWNER, batch_id)
    assert (seen.status, seen.cancelling_at is not None) == (Status.CANCELLING, True)
    assert room.batches.cancel(OWNER, batch_id).cancelling_at == seen.cancelling_at


@pytest.mark.parametrize(
    ("end", "status", "failed"),
    [(expire, Status.EXPIRED, 4), (cancel, Status.CANCELLED, 0)],
    ids=["expired", "cancelled"],
)
def test_batch_that_ends_early_keeps_what_was_computed(
    room: Room, end: Any, status: Status, failed: int
) -> None:
    batch_id = room.begin()
    running = room.attempt(batch_id)
    # Its results come too late for the attempt, whose process is killed.
    room.answer(batch_id, 0)
    end(room, batch_id)
    assert running.run() is None  # It ends by itself.
    record = room.load(batch_id)
    counts = record.request_counts
    assert (record.status, counts.completed, counts.failed) == (status, 2, failed)
    assert len(room.content(record.output_file_id)) == 2
    if failed:
        errors = [line["error"]["code"] for line in room.content(record.error_file_id)]
        assert errors == ["batch_expired"] * failed
    with pytest.raises(Problem, match="too late"):
        room.batches.cancel(OWNER, batch_id)


@pytest.mark.parametrize("end", [expire, cancel])
def test_batch_whose_model_has_gone_waits_and_can_end(room: Room, end: Any) -> None:
    batch_id = room.begin()
    room.batches.change(batch_id, lambda now: now.model_copy(update={"model": "gone"}))
    assert room.attempt(batch_id).run() == steps.PAUSE_S
    end(room, batch_id)
    assert room.attempt(batch_id).run() is None
    assert room.load(batch_id).is_over


def test_batch_whose_input_is_gone_keeps_what_was_computed(room: Room) -> None:
    batch_id = room.begin()
    room.answer(batch_id, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "ATTEMPT_S", 1.0)
        assert room.attempt(batch_id).run() == 0
    room.files.remove(OWNER, room.load(batch_id).input_file_id)
    assert room.attempt(batch_id).run() is None
    record = check_failed(room, batch_id, "file_not_found")
    assert record.request_counts.completed == 2
    assert len(room.content(record.output_file_id)) == 2


def test_second_message_of_a_batch_that_runs_goes(room: Room, bare: Any) -> None:
    batch_id = room.create(*TEXTS)
    with room.batches.attempt(batch_id):
        room.app.tasks[BATCH](batch_id)
    assert room.load(batch_id).status is Status.VALIDATING


def test_batch_without_a_sign_of_life_is_taken_up(
    room: Room, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_batches, "LIFE_S", -1.0)
    batch_id = room.create(*TEXTS)
    bare.delete("batchery.gateway")  # The message is lost.
    jobs.tidy(room.context)
    (message,) = bare.lrange("batchery.gateway", 0, -1)
    assert batch_id in json.loads(message)["headers"]["argsrepr"]


def test_slice_whose_jobs_were_lost_sends_them_again(
    room: Room, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = room.begin()

    def waiting() -> list[str]:
        assert room.attempt(batch_id).run() is not None
        (queue,) = bare.keys("embed*")
        return sorted(json.loads(each)["headers"]["id"] for each in bare.lrange(queue, 0, -1))

    ids = waiting()
    monkeypatch.setattr(steps, "STALL_S", -1.0)
    assert (waiting(), len(ids)) == (ids, 4)  # Nothing is lost.
    bare.delete(*bare.keys("embed*"))
    assert waiting() == ids


# Files


def test_files_have_so_many_bytes_and_a_maximum_number(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = room.upload(b"x" * 60, caller=SMALL)
    with pytest.raises(Problem, match="max_stored_bytes = 100") as raised:
        room.upload(b"x" * 41, caller=SMALL)
    assert raised.value.kind is Kind.TOO_LARGE
    room.upload(b"x" * 40, caller=SMALL)
    room.files.remove(OWNER, first.id)
    monkeypatch.setattr(stored_files, "MAX_FILES", 2)
    room.upload(b"x" * 60, caller=SMALL)
    with pytest.raises(Problem, match="there are 2 already"):
        room.upload(b"x")


class Broken(io.BytesIO):
    """An upload that is cut off."""

    def read(self, size: int | None = -1) -> bytes:
        if self.tell():
            raise EOFError
        return super().read(4)


def test_upload_that_fails_takes_no_space(room: Room) -> None:
    with pytest.raises(Problem, match="file: empty"):
        room.upload(b"")
    for _ in range(2):
        with pytest.raises(DatasetError):
            room.files.upload(SMALL, "a", Broken(b"half of it"), 90)
    assert room.contents() == []
    kept, away = room.folder, room.folder.with_suffix(".away")
    kept.rename(away)
    kept.touch()  # No folder, so nothing can be removed either.
    with pytest.raises(DatasetError):
        room.upload(b"x" * 90, caller=SMALL)
    kept.unlink()
    away.rename(kept)
    room.upload(b"x" * 100, caller=SMALL)


def test_what_could_not_be_removed_is_removed_later(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "TIDY_S", 0.002)
    monkeypatch.setattr(stored_files, "REMOVE_AGAIN_S", 0.0)
    kept, stuck, gone = (room.upload(content) for content in (b"kept", b"stuck", b"gone"))
    remove = room.files.storage.remove
    monkeypatch.setattr(room.files.storage, "remove", fail)
    for each in (stuck, gone):
        room.files.remove(OWNER, each.id)
    # One that cannot be removed keeps no other.
    monkeypatch.setattr(
        room.files.storage, "remove", lambda name: fail() if stuck.id in name else remove(name)
    )

    def names() -> set[str]:
        with suppress(DatasetError):
            jobs.tidy(room.context)
        return {each.name for each in (room.folder / OWNER / "files").iterdir()}

    wait_for(lambda: names() == {kept.id, stuck.id}, f"{gone.id} is gone")


@pytest.mark.parametrize("wrong", ["", "file-1", "../x", "file-" + "0" * 46, "bytes"])
def test_id_of_no_file_is_told(room: Room, wrong: str) -> None:
    with pytest.raises(Problem, match="no such file"):
        room.files.get(OWNER, wrong)


def test_pages_follow_each_other_even_where_a_file_is_gone(room: Room) -> None:
    ids = [room.upload(b"content").id for _ in range(5)]

    def page(after: str | None, *, newest_first: bool = True) -> tuple[list[str], bool]:
        found, more = room.files.page(OWNER, after, 2, newest_first=newest_first, purpose="batch")
        return [each.id for each in found], more

    assert page(None) == ([ids[4], ids[3]], True)
    room.files.remove(OWNER, ids[3])
    assert page(ids[3]) == ([ids[2], ids[1]], True)
    assert page(ids[1]) == ([ids[0]], False)
    assert page(None, newest_first=False) == ([ids[0], ids[1]], True)
    assert page(ids[1], newest_first=False) == ([ids[2], ids[4]], False)
    assert room.files.page("tenant-other", None, 2, newest_first=True, purpose=None) == ([], False)
