"""Turns of a batch, in a real Redis: what late, doubled and interrupted ones do to its files."""

import io
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, states

from batchery.errors import DatasetError
from batchery.settings import Settings
from batchery_producer.files.journal import Journal
from batchery_producer.gateway.batches import files as stored_files
from batchery_producer.gateway.batches import turn as turns
from batchery_producer.gateway.batches.files import (
    FileObject,
    FileStore,
    Storage,
    get_owner,
    new_id,
)
from batchery_producer.gateway.batches.store import (
    BatchObject,
    BatchRecord,
    BatchStore,
    Piece,
    RequestCounts,
    Slice,
    Status,
    Superseded,
    build_folder_name,
)
from batchery_producer.gateway.batches.turn import BatchTurn, MissingPieceError, TurnContext
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.jobs import Jobs
from batchery_producer.gateway.models import ServedModels
from batchery_producer.gateway.problems import Problem
from batchery_producer.gateway.store import JobQueue, Store
from support.harness import wait_for
from support.object_store import PartsFile, PartsFileSystem, register
from support.own_redis import OwnRedis

OWNER = "tenant-acme"
CALLER = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100, max_open_batches=3)

#: Lines in each piece of a batch that is to be finished, and number of pieces.
LINES, PIECES = 1000, 50


class Room:
    """The files and batches of one process."""

    def __init__(self, url: str, files: str) -> None:
        self.app = Celery("turns", broker=url, backend=url, set_as_current=False)
        self.app.conf.update(
            batchery_gateway={"files": files},
            batchery_models={"embed": {"kind": "embedding", "model": "none"}},
        )
        self.folder = files
        store = Store(self.app)
        self.files = FileStore(store, Storage(files))
        self.jobs = JobQueue(self.app, store)
        self.batches = BatchStore(store, self.files, self.jobs)
        models = ServedModels(Settings.load(self.app.conf).models)
        self.context = TurnContext(self.app, models, self.files, self.batches)

    def begin(self, batch_id: str, number: int = -1) -> BatchTurn:
        begun = self.batches.begin(batch_id, number)
        assert begun is not None
        return BatchTurn(self.context, *begun)

    def upload(self, content: bytes, caller: Caller = CALLER, **options: Any) -> FileObject:
        options = {"size": len(content), "expires_s": None, **options}
        return self.files.upload(caller, "n" * 300, io.BytesIO(content), **options)

    def known_files(self) -> dict[bytes, bytes]:
        backend: Any = self.app.backend
        found: dict[bytes, bytes] = backend.client.hgetall(self.files.get_key(OWNER))
        return found

    def content(self, file_id: str | None) -> bytes:
        assert file_id is not None
        with self.files.open(OWNER, file_id) as file:
            return file.read()


@pytest.fixture
def room(url: str, tmp_path: Path) -> Room:
    return Room(url, str(tmp_path / "files"))


def record_of(file_id: str = "file-1", **changes: Any) -> BatchRecord:
    now_s = int(time.time())
    batch = BatchObject(
        id=new_id("batch_"),
        endpoint="/v1/embeddings",
        model="embed",
        input_file_id=file_id,
        completion_window="24h",
        created_at=now_s,
        expires_at=now_s + 3600,
        **changes,
    )
    info = {"run": "0" * 16, "max_items": 10, "max_chars": 1000}
    return BatchRecord.model_validate(
        {"batch": batch, "owner": OWNER, "tenant": "acme", "priority": 6, **info}
    )


def line(number: int) -> bytes:
    return json.dumps({"custom_id": f"r-{number}", "response": "x" * 40}).encode() + b"\n"


WHOLE = b"".join(map(line, range(LINES * PIECES)))


def finishing(room: Room) -> BatchRecord:
    """A batch of 50,000 lines whose files are to be made."""
    counts = RequestCounts(total=LINES * PIECES, completed=LINES * PIECES)
    record = record_of(
        status=Status.FINALIZING, finalizing_at=int(time.time()), request_counts=counts
    )
    room.batches.add(record, 10)
    _, turn = room.batches.begin(record.id, 0) or pytest.fail("no turn")
    for number in range(PIECES):
        content = b"".join(map(line, range(number * LINES, (number + 1) * LINES)))
        name = f"output-{number:03d}"
        room.files.storage.write(f"{build_folder_name(OWNER, record.id)}/{name}", content)
        room.batches.save(record, turn, pieces=[Piece(name, len(content))])
    return record


def check_whole(room: Room, record: BatchRecord) -> None:
    batch = room.batches.get(OWNER, record.id).batch
    assert batch.status is Status.COMPLETED
    assert room.content(batch.output_file_id) == WHOLE
    found, _ = room.files.page(OWNER, None, 10, newest_first=True, purpose=None)
    assert [(each.id, each.bytes) for each in found] == [(batch.output_file_id, len(WHOLE))]


def test_late_attempt_leaves_the_finished_file_whole(room: Room) -> None:
    record = finishing(room)
    late, other = room.begin(record.id), room.begin(record.id)
    other.run()
    # The other one has tidied up: pieces are gone, and nothing is read as empty.
    with pytest.raises((Superseded, MissingPieceError)):
        late.run()
    check_whole(room, record)


def test_late_attempt_that_has_written_all_changes_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finishing(room)
    late, other = room.begin(record.id), room.begin(record.id)
    other_may, late_may = threading.Event(), threading.Event()
    join = late._join

    def slowly(*arguments: Any) -> Any:
        made = join(*arguments)
        other_may.set()
        assert late_may.wait(60)
        return made

    monkeypatch.setattr(late, "_join", slowly)
    monkeypatch.setattr(late, "_look", lambda: None)
    superseded = threading.Event()

    def run() -> None:
        with pytest.raises(Superseded):
            late.run()
        superseded.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert other_may.wait(60)
    other.run()
    late_may.set()
    thread.join()
    assert superseded.is_set()
    check_whole(room, record)


def test_store_that_answers_late_opens_no_hole(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    PartsFileSystem.contents = {}
    room = Room(url, "parts://bucket/late")
    record = finishing(room)
    late, other = room.begin(record.id), room.begin(record.id)
    held, go_on = threading.Event(), threading.Event()
    superseded = threading.Event()

    def run() -> None:
        with pytest.raises(Superseded):
            late.run()
        superseded.set()

    thread = threading.Thread(target=run)
    upload = PartsFile._upload_chunk

    def slowly(self: PartsFile, final: bool = False) -> bool:
        if threading.current_thread() is thread:
            held.set()
            assert go_on.wait(60)
        return upload(self, final)

    monkeypatch.setattr(PartsFile, "_upload_chunk", slowly)
    # Without it, it notices before it has written anything.
    monkeypatch.setattr(late, "_look", lambda: None)
    thread.start()
    assert held.wait(60)
    other.run()
    go_on.set()
    thread.join()
    assert superseded.is_set()
    check_whole(room, record)


def test_redis_that_is_away_for_10_s_while_the_files_are_made_shortens_nothing(
    own_redis: OwnRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(own_redis.url, str(tmp_path / "files"))
    record = finishing(room)
    first = room.begin(record.id)
    copy, killed = first._copy, threading.Event()

    def failing_over(piece: Piece, written: Any) -> None:
        if not killed.is_set():
            own_redis.kill()
            killed.set()
            threading.Timer(10, own_redis.start).start()
        copy(piece, written)

    monkeypatch.setattr(first, "_copy", failing_over)
    monkeypatch.setattr(turns, "LOOK_S", 0.0)
    first.run()
    check_whole(room, record)
    assert room.batches.begin(record.id, 0) is not None
    room.begin(record.id).run()
    check_whole(room, record)


def test_piece_that_is_missing_or_short_is_no_empty_one(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finishing(room)
    name = f"{build_folder_name(OWNER, record.id)}/output-007"
    opened = room.files.storage.open(name)
    assert opened is not None
    with opened:
        whole = opened.read()
    for broken in (None, whole[:-1]):
        if broken is None:
            room.files.storage.remove(name)
        else:
            room.files.storage.write(name, broken)
        with pytest.raises(MissingPieceError, match="output-007"):
            room.begin(record.id).run()
        assert room.batches.get(OWNER, record.id).batch.status is Status.FINALIZING
    # A store may show it late.
    room.files.storage.write(name, whole)
    room.begin(record.id).run()
    check_whole(room, record)


def test_batch_whose_pieces_stay_away_fails_and_says_so(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = finishing(room)
    room.files.storage.remove(f"{build_folder_name(OWNER, record.id)}/output-007")
    monkeypatch.setattr(turns, "MISSING_S", 0.0)
    batch = room.begin(record.id).run().batch
    assert (batch.status, batch.output_file_id) == (Status.FAILED, None)
    assert batch.errors is not None
    assert batch.errors.data[0].code == "missing_results"


@pytest.mark.parametrize(
    ("ago_s", "status"), [(0, Status.FAILED), (7200, Status.EXPIRED)], ids=["gone", "expired"]
)
def test_batch_whose_input_is_gone_keeps_what_was_computed(
    room: Room, ago_s: int, status: Status
) -> None:
    file = room.upload(b"{}" * 5)
    counts = RequestCounts(total=3, completed=1)
    record = record_of(file.id, status=Status.IN_PROGRESS, request_counts=counts)
    record = record.with_batch(
        record.batch.model_copy(update={"expires_at": record.batch.expires_at - ago_s})
    ).model_copy(update={"slices": [Slice(0, 0)], "ended_lines": [1], "sent": 1, "sending": 1})
    room.batches.add(record, 10)
    _, turn = room.batches.begin(record.id, 0) or pytest.fail("no turn")
    room.files.storage.write(f"{build_folder_name(OWNER, record.id)}/output-1", line(1))
    room.batches.save(record, turn, pieces=[Piece("output-1", len(line(1)))])
    room.files.remove(OWNER, file.id)
    batch = room.begin(record.id).run().batch
    assert (batch.status, batch.request_counts.completed) == (status, 1)
    assert room.content(batch.output_file_id) == line(1)


def test_batch_that_cannot_be_finished_leaves_no_file_behind(room: Room) -> None:
    record = finishing(room)
    # Its output is whole, and its errors have a piece that is not there.
    _, turn = room.batches.begin(record.id, -1) or pytest.fail("no turn")
    room.batches.save(record, turn, pieces=[Piece("error-1", 10)])
    for _ in range(2):
        with pytest.raises(MissingPieceError, match="error-1"):
            room.begin(record.id).run()
    assert list(Path(room.folder).rglob("*.jsonl")) == []
    assert room.known_files() == {b"bytes": b"0"}


def begun(room: Room, content: bytes, model: str = "embed", **progress: Any) -> BatchRecord:
    """A batch of one slice that an earlier turn has begun."""
    record = record_of(room.upload(content).id, status=Status.IN_PROGRESS)
    changes = {"model": model, "request_counts": RequestCounts(total=1)}
    record = record.with_batch(record.batch.model_copy(update=changes))
    record = record.model_copy(update={"slices": [Slice(0, 0)], **progress})
    room.batches.add(record, 10)
    return record


def expire(room: Room, record: BatchRecord) -> None:
    batch = record.batch.model_copy(update={"expires_at": int(time.time()) - 1})
    _, turn = room.batches.begin(record.id, -1) or pytest.fail("no turn")
    room.batches.save(record.with_batch(batch), turn)


def test_batch_whose_model_has_gone_can_be_cancelled_and_expires(room: Room) -> None:
    endings: list[tuple[Callable[[BatchRecord], Any], Status]] = [
        (lambda record: room.batches.cancel(OWNER, record.id), Status.CANCELLED),
        (lambda record: expire(room, record), Status.EXPIRED),
    ]
    for end, status in endings:
        record = begun(room, b"{}", model="gone")
        # It may come back.
        with pytest.raises(Problem, match="no such model"):
            room.begin(record.id).run()
        end(record)
        assert room.begin(record.id).run().batch.status is status
        assert room.batches.uses(OWNER, record.batch.input_file_id) is None


def test_what_a_killed_turn_has_sent_is_kept_at_the_end(room: Room) -> None:
    body = {"model": "embed", "input": "t"}
    request = {"custom_id": "a", "url": "/v1/embeddings", "body": body}
    record = begun(room, json.dumps(request).encode(), sending=1)
    job = Journal(record.run, "", {}, [""], []).task_id(0, 1)
    stored = {"status": states.SUCCESS, "result": {"vector": [1.0], "tokens": 1}, "task_id": job}
    backend: Any = room.app.backend
    backend.client.set(backend.get_key_for_task(job), backend.encode(stored))
    expire(room, record)
    batch = room.begin(record.id).run().batch
    assert (batch.status, batch.request_counts.completed) == (Status.EXPIRED, 1)
    assert batch.error_file_id is None


def test_turn_that_is_over_is_not_begun_again(room: Room) -> None:
    record = record_of()
    room.batches.add(record, 10)
    turn = room.begin(record.id, 0)
    number = turn.hand_over()
    assert room.batches.begin(record.id, 0) is None
    assert room.batches.begin(record.id, number) is not None
    # The one before has nothing more to say.
    with pytest.raises(Superseded):
        turn.hand_over()


def test_owner_has_so_many_open_batches(room: Room) -> None:
    for _ in range(3):
        room.batches.add(last := record_of(), 3)
    with pytest.raises(Problem, match="max_open_batches"):
        room.batches.add(record_of(), 3)
    room.batches.close(last)
    room.batches.add(record_of(), 3)


# Files


def test_files_have_so_many_bytes(room: Room) -> None:
    first = room.upload(b"x" * 60)
    with pytest.raises(Problem, match="max_stored_bytes = 100"):
        room.upload(b"x" * 41)
    room.upload(b"x" * 40)
    room.files.remove(OWNER, first.id)
    room.upload(b"x" * 60)


def test_files_have_a_maximum_number(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "MAX_FILES", 2)
    first = room.upload(b"x")
    room.upload(b"x")
    with pytest.raises(Problem, match="there are 2 already"):
        room.upload(b"x")
    room.files.remove(OWNER, first.id)
    room.upload(b"x")


def test_upload_that_fails_takes_no_space(room: Room, tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise EOFError
            return super().read(4)

    for _ in range(3):
        with pytest.raises(EOFError):
            room.files.upload(CALLER, "a", Broken(b"half of it"), 90, None)
    with pytest.raises(Problem, match="file: empty"):
        room.upload(b"")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    room.upload(b"x" * 100)


def test_upload_that_the_store_refuses_takes_no_space(room: Room) -> None:
    kept, away = Path(room.folder), Path(f"{room.folder}.away")
    room.upload(b"x" * 10)
    # Neither can the file be removed then.
    kept.rename(away)
    kept.touch()
    for _ in range(3):
        with pytest.raises(DatasetError):
            room.upload(b"x" * 90)
    kept.unlink()
    away.rename(kept)
    room.upload(b"x" * 90)


def test_file_goes_when_its_time_is_over_though_nobody_asks(
    room: Room, tmp_path: Path, url: str
) -> None:
    sweeper = Jobs(room.app)
    room.upload(b"kept")
    room.upload(b"short", expires_s=-1)
    used = room.upload(b"in use", expires_s=-1)
    room.batches.add(running := record_of(used.id), 10)

    def contents() -> set[bytes]:
        sweeper.sweep()
        return {path.read_bytes() for path in tmp_path.rglob("*.jsonl")}

    wait_for(lambda: contents() == {b"kept", b"in use"}, "it is gone")
    room.batches.close(running)
    room.context.files._store.call(
        lambda client: client.zadd(room.files.removals_key, {f"{OWNER}/{used.id}": 0})
    )
    wait_for(lambda: contents() == {b"kept"}, "it is gone as well")
    assert room.upload(b"x" * 96).bytes == 96


def test_file_that_cannot_be_removed_keeps_no_other(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "ASK_S", 0.0)
    sweeper = Jobs(room.app)
    files = [room.upload(b"short", expires_s=-1) for _ in range(3)]
    paths = [Path(room.folder, OWNER, "files", f"{file.id}.jsonl") for file in files]
    paths[0].unlink()
    paths[0].mkdir()

    def contents() -> list[Path]:
        with suppress(DatasetError):
            sweeper.sweep()
        return [path for path in paths if path.exists()]

    wait_for(lambda: contents() == paths[:1], "the others are gone")


def test_uploaded_file_is_kept_whole_under_a_short_name(room: Room) -> None:
    file = room.upload(b"content")
    assert (file.bytes, len(file.filename), file.expires_at) == (7, 255, None)
    assert room.files.get(OWNER, file.id) == file
    assert room.content(file.id) == b"content"
    short = room.upload(b"content", expires_s=3600)
    assert short.expires_at == short.created_at + 3600


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
    assert room.files.page(OWNER, None, 2, newest_first=True, purpose="other") == ([], False)
    assert room.files.page("tenant-other", None, 2, newest_first=True, purpose=None) == ([], False)


def test_batch_is_open_until_it_is_closed(room: Room) -> None:
    made = record_of()
    room.batches.add(made, 10)
    assert room.batches.get(OWNER, made.id) == made
    assert room.batches.uses(OWNER, "file-1") == made.id
    assert room.batches.uses("tenant-other", "file-1") is None
    room.batches.close(made)
    assert room.batches.uses(OWNER, "file-1") is None
    assert room.batches.get(OWNER, made.id) == made
    with pytest.raises(Problem, match="no such batch"):
        room.batches.get("tenant-other", made.id)


def test_batch_that_is_to_be_cancelled_says_so_at_once(room: Room) -> None:
    made = record_of()
    room.batches.add(made, 10)
    room.batches.cancel(made.owner, made.id)
    at_s = room.batches.cancelled_at(made)
    room.batches.cancel(made.owner, made.id)
    seen = room.batches.get(OWNER, made.id).batch
    assert (seen.status, seen.cancelling_at) == (Status.CANCELLING, at_s)
    # Too late for a batch whose files are being made.
    late = made.with_batch(made.batch.model_copy(update={"status": Status.FINALIZING}))
    room.batches.add(late, 10)
    assert room.batches.get(OWNER, late.id).batch.status is Status.FINALIZING
    with pytest.raises(Problem, match="too late"):
        room.batches.cancel(OWNER, late.id)


def test_owner_is_the_tenant_and_a_plain_name_of_a_folder() -> None:
    def owner(name: str, tenant: str | None) -> str:
        return get_owner(Caller(name, tenant, None, 1, 1, 1))

    assert owner("new", "acme") == owner("old", "acme") == "tenant-acme"
    assert owner("acme", None) == owner("acme", "") == "key-acme"
    odd = [owner("a", tenant) for tenant in ("..", "a/b", "a,b", "a b", "ü" * 200, "é" * 200)]
    assert len(set(odd)) == 6
    assert all(set("/, ").isdisjoint(each) and len(each) < 200 for each in odd)
