"""Steps of a batch, in a real Redis: what late, doubled, lost and killed ones do to its files."""

import base64
import io
import json
import struct
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, states

from batchery.errors import BatcheryError, DatasetError
from batchery_producer.gateway import jobs
from batchery_producer.gateway.batches import files as stored_files
from batchery_producer.gateway.batches import run as steps
from batchery_producer.gateway.batches import store as stored_batches
from batchery_producer.gateway.batches.files import FileObject
from batchery_producer.gateway.batches.requests import BatchRequests
from batchery_producer.gateway.batches.run import MAX_LOST_ATTEMPTS, BatchRun, MissingPieceError
from batchery_producer.gateway.batches.store import BatchRecord, Status, Superseded
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Problem
from support.harness import wait_for
from support.own_redis import OwnRedis

OWNER = "tenant-acme"
CALLER = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100_000, max_open_batches=3)
SMALL = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100)


#: Two numbers in base64, as workers of ours store them.
VECTOR = base64.b64encode(struct.pack("<2f", 1, 2)).decode()


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

    def upload(
        self, content: bytes, expires_s: int | None = None, caller: Caller = CALLER
    ) -> FileObject:
        file = io.BytesIO(content)
        return self.files.upload(caller, "a.jsonl", file, len(content), expires_s)

    def create(self, *texts: str, window_s: int = 3600, model: str = "embed") -> str:
        """A batch with a request for each text; returns its id."""
        rows = [
            {
                "custom_id": f"r-{number}",
                "url": "/v1/embeddings",
                "body": {"model": model, "input": text},
            }
            for number, text in enumerate(texts)
        ]
        file = self.upload("\n".join(map(json.dumps, rows)).encode())
        said = {"endpoint": "/v1/embeddings", "completion_window": "1h"}
        return self.batches.create(CALLER, file.id, window_s, None, 6, **said).id

    def load(self, batch_id: str) -> BatchRecord:
        record = self.batches.load(batch_id)
        assert record is not None
        return record

    def run(self, batch_id: str) -> BatchRun:
        return BatchRun(self.context, self.load(batch_id))

    def answer(self, batch_id: str, *slices: int) -> None:
        """Stores results of the jobs of some slices, as a worker does."""
        backend: Any = self.app.backend
        for number in slices:
            for request in BatchRequests(self.load(batch_id), self.files).read(number):
                for job in request.jobs:
                    result = {"vector": VECTOR, "tokens": 1}
                    stored = {"status": states.SUCCESS, "result": result, "task_id": job.id}
                    key = backend.get_key_for_task(job.id)
                    backend.client.set(key, backend.encode(stored))

    def content(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        with self.files.open(OWNER, file_id) as file:
            return list(map(json.loads, file))

    def contents(self) -> list[Path]:
        """What is in the folder of files."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture
def room(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    # Two requests in a slice, and nobody waits for those that nobody computes.
    monkeypatch.setattr("batchery_producer.gateway.batches.requests.SLICE_JOBS", 2)
    monkeypatch.setattr(steps, "IDLE_S", 0.01)
    monkeypatch.setattr(steps, "COLLECT_S", 0.01)
    return Room(url, tmp_path / "files")


TEXTS = tuple("x" * number for number in range(1, 7))


def work(room: Room, *, is_finished: bool = True) -> str:
    """A batch of three slices whose answers are written; returns its id."""
    batch_id = room.create(*TEXTS)
    room.run(batch_id).advance()
    room.answer(batch_id, 0, 1, 2)
    for number in range(3):
        assert room.run(batch_id).run_slice(number) is None
    if is_finished:
        room.run(batch_id).advance()
    return batch_id


def check_whole(room: Room, batch_id: str) -> None:
    record = room.load(batch_id)
    assert (record.status, record.request_counts.completed) == (Status.COMPLETED, len(TEXTS))
    lines = room.content(record.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r-{n}" for n in range(len(TEXTS))]
    found, _ = room.files.page(OWNER, None, 10, newest_first=True, purpose="batch_output")
    assert [each.id for each in found] == [record.output_file_id]
    # The input, and the output.
    assert len(room.contents()) == 2


def test_batch_has_the_answers_of_all_slices_in_order(room: Room) -> None:
    check_whole(room, work(room))


def test_slice_that_runs_twice_is_written_once(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    room.run(batch_id).advance()
    late = room.run(batch_id)
    room.answer(batch_id, 0, 1, 2)
    for number in (0, 1, 2, 0, 1):
        room.run(batch_id).run_slice(number)
    assert late.run_slice(2) is None
    room.run(batch_id).advance()
    assert late.run_slice(1) is None
    check_whole(room, batch_id)


def test_late_attempt_to_make_the_files_leaves_them_whole(room: Room) -> None:
    batch_id = work(room, is_finished=False)
    late = [room.run(batch_id), room.run(batch_id)]
    room.run(batch_id).advance()
    for each in late:
        with suppress(Superseded):
            each.advance()
    check_whole(room, batch_id)


def test_two_that_make_the_files_at_once_make_one(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = work(room, is_finished=False)
    frozen = room.run(batch_id)
    monkeypatch.setattr(room.batches.__class__, "close", lambda *_: None)
    frozen.advance()  # Nothing is tidied up, so the pieces are there for the other one, too.
    monkeypatch.undo()
    assert room.load(batch_id).status is Status.COMPLETED
    room.run(batch_id).advance()
    check_whole(room, batch_id)


def test_redis_that_is_away_while_the_files_are_made_shortens_nothing(
    own_redis: OwnRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchery_producer.gateway.batches.requests.SLICE_JOBS", 2)
    room = Room(own_redis.url, tmp_path / "files")
    batch_id = work(room, is_finished=False)
    opened, killed = room.files.storage.open, threading.Event()

    def fail_over(name: str) -> Any:
        if not killed.is_set():
            own_redis.kill()
            killed.set()
        return opened(name)

    monkeypatch.setattr(room.files.storage, "open", fail_over)
    with pytest.raises((Problem, BatcheryError)):
        room.run(batch_id).advance()
    own_redis.start()

    def advance() -> bool:
        with suppress(Problem, BatcheryError):
            room.run(batch_id).advance()
            return True
        return False

    wait_for(advance, "Redis is back")
    record = room.load(batch_id)
    assert (record.status, len(room.content(record.output_file_id))) == (Status.COMPLETED, 6)


def test_answers_that_are_missing_are_waited_for_and_then_the_batch_fails(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = work(room, is_finished=False)
    (piece,) = [path for path in room.contents() if path.name.startswith("1-output")]
    whole = piece.read_bytes()
    for broken in (None, whole[:-1]):
        piece.write_bytes(broken) if broken else piece.unlink()
        with pytest.raises(MissingPieceError, match="1-output"):
            room.run(batch_id).advance()
        assert room.load(batch_id).status is Status.FINALIZING
    # Nothing is left of what could be joined.
    known, _ = room.files.page(OWNER, None, 10, newest_first=True, purpose=None)
    assert len(list(room.folder.rglob("*.jsonl"))) == len(known)
    other_id = work(room, is_finished=False)
    for path in room.contents():
        if other_id in str(path):
            path.unlink()
    monkeypatch.setattr(steps, "MISSING_S", 0.0)
    room.run(other_id).advance()
    failed = room.load(other_id)
    assert (failed.status, failed.output_file_id) == (Status.FAILED, None)
    assert failed.errors is not None
    assert failed.errors.data[0].code == "missing_results"
    # A store may show it late.
    piece.write_bytes(whole)
    room.run(batch_id).advance()
    assert len(room.content(room.load(batch_id).output_file_id)) == 6


def expire(room: Room, batch_id: str) -> None:
    room.batches.save(room.load(batch_id).model_copy(update={"expires_at": 0}))


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
    batch_id = room.create(*TEXTS)
    room.run(batch_id).advance()
    running = room.run(batch_id)
    # Its results come too late for the step, whose process is killed.
    assert room.run(batch_id).run_slice(0) is not None
    room.answer(batch_id, 0)
    end(room, batch_id)
    assert running.run_slice(1) is None  # It ends by itself.
    room.run(batch_id).advance()
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
    batch_id = room.create(*TEXTS)
    room.run(batch_id).advance()
    room.batches.save(room.load(batch_id).model_copy(update={"model": "gone"}))
    assert room.run(batch_id).run_slice(0) == steps.PAUSE_S
    end(room, batch_id)
    room.run(batch_id).advance()
    assert room.load(batch_id).is_over


def test_batch_whose_input_is_gone_keeps_what_was_computed(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    room.run(batch_id).advance()
    room.answer(batch_id, 0)
    room.run(batch_id).run_slice(0)
    room.files.remove(OWNER, room.load(batch_id).input_file_id)
    room.run(batch_id).run_slice(1)
    record = room.load(batch_id)
    assert (record.status, record.request_counts.completed) == (Status.FAILED, 2)
    assert record.errors is not None
    assert record.errors.data[0].code == "file_not_found"
    assert len(room.content(record.output_file_id)) == 2


def test_step_that_kills_its_process_again_and_again_ends_the_batch(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    # A killed process never leaves the block.
    killed = [
        room.batches.attempt(room.load(batch_id), "reading or writing")
        for _ in range(MAX_LOST_ATTEMPTS)
    ]
    assert [each.__enter__() for each in killed] == list(range(MAX_LOST_ATTEMPTS))
    task = SimpleNamespace(app=room.app)
    jobs.run_step(task, batch_id, "reading or writing", BatchRun.advance)
    record = room.load(batch_id)
    assert record.status is Status.FAILED
    assert record.errors is not None
    assert record.errors.data[0].code == "lost_attempts"
    assert room.batches.uses(OWNER, record.input_file_id) is None


def test_batch_without_a_sign_of_life_is_taken_up(
    room: Room, bare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_batches, "LIFE_S", -1.0)
    batch_id = room.create(*TEXTS)
    bare.delete("batchery.gateway")  # The message is lost.
    jobs.tidy(room.context)
    (message,) = bare.lrange("batchery.gateway", 0, -1)
    assert batch_id in json.loads(message)["headers"]["argsrepr"]


def test_owner_has_so_many_open_batches(room: Room) -> None:
    ids = [room.create("a") for _ in range(3)]
    with pytest.raises(Problem, match="max_open_batches"):
        room.create("a")
    cancel(room, ids[0])
    room.run(ids[0]).advance()
    room.create("a")


# Files


def test_files_have_so_many_bytes_and_a_maximum_number(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = room.upload(b"x" * 60, caller=SMALL)
    with pytest.raises(Problem, match="max_stored_bytes = 100"):
        room.upload(b"x" * 41, caller=SMALL)
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
            room.files.upload(SMALL, "a", Broken(b"half of it"), 90, None)
    assert room.contents() == []
    kept, away = room.folder, room.folder.with_suffix(".away")
    kept.rename(away)
    kept.touch()  # No folder, so nothing can be removed either.
    with pytest.raises(DatasetError):
        room.upload(b"x" * 90, caller=SMALL)
    kept.unlink()
    away.rename(kept)
    room.upload(b"x" * 100, caller=SMALL)


def test_file_goes_when_its_time_is_over_though_nobody_asks(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "TIDY_S", 0.002)
    monkeypatch.setattr(stored_files, "ASK_S", 0.0)
    kept, stuck, gone, used = (
        room.upload(content, expires_s)
        for content, expires_s in ((b"kept", None), (b"stuck", -1), (b"gone", -1), (b"{}", 7200))
    )
    said = {"endpoint": "/v1/embeddings", "completion_window": "1h"}
    room.batches.create(CALLER, used.id, 3600, None, 6, **said)
    # It cannot be removed, and keeps no other.
    monkeypatch.setattr(room.files.storage, "remove", refusing(room, stuck.id))

    def names() -> set[str]:
        with suppress(DatasetError):
            jobs.tidy(room.context)
        return {each.stem for each in (room.folder / OWNER / "files").iterdir()}

    wait_for(lambda: names() == {kept.id, stuck.id, used.id}, f"{gone.id} is gone")


def refusing(room: Room, file_id: str) -> Any:
    remove = room.files.storage.remove

    def refuse(name: str) -> None:
        if file_id in name:
            raise DatasetError("it cannot be removed")
        remove(name)

    return refuse


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
