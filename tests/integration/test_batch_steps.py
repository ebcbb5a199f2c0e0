"""Runs of a batch, in a real Redis: what late, doubled and failed ones do to its files."""

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from starlette.requests import Request
from starlette.responses import Response

from batchery.errors import DatasetError
from batchery_producer.gateway import batch_run as runs
from batchery_producer.gateway import jobs
from batchery_producer.gateway.batch_run import ROUTES, BatchRun
from batchery_producer.gateway.batches import files as stored_files
from batchery_producer.gateway.batches.files import FileObject
from batchery_producer.gateway.batches.store import BatchRecord, Status
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.metrics import Measurements
from batchery_producer.gateway.models import ServedModels
from batchery_producer.gateway.problems import Kind, Problem
from batchery_producer.gateway.running import Gateway

OWNER = "tenant-acme"
CALLER = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100_000, max_open_batches=3)
SMALL = Caller("acme", "acme", None, 1, 10, 1000, max_stored_bytes=100)

TEXTS = tuple("x" * number for number in range(1, 7))

EMBEDDINGS = "/v1/embeddings"

ANSWER = Response(b'{"usage": {"prompt_tokens": 1, "total_tokens": 1}}')


class Room:
    """The files and batches of one process. Nobody runs these, but for the test."""

    def __init__(self, url: str, folder: Path) -> None:
        app = Celery("runs", broker=url, backend=url, set_as_current=False)
        app.conf.update(
            batchery_gateway={"files": str(folder)},
            batchery_models={
                "embed": {"kind": "embedding", "model": "none"},
                "chat": {"kind": "generation", "model": "none"},
            },
        )
        self.app, self.folder = app, folder
        self.gateway = Gateway(app, jobs.app_settings(app), Measurements())
        self.files, self.batches = self.gateway.files, self.gateway.batches

    def upload(self, content: bytes, caller: Caller = CALLER) -> FileObject:
        file = io.BytesIO(content)
        return self.files.upload(caller, "a.jsonl", file, len(content))

    def create(self, *texts: str, url: str = EMBEDDINGS, **body: Any) -> str:
        """A batch with a request for each text; returns its id."""
        rows = [
            {
                "custom_id": f"r-{number}",
                "url": url,
                "body": {"model": "embed", "input": text, **body},
            }
            for number, text in enumerate(texts)
        ]
        file = self.upload("\n".join(map(json.dumps, rows)).encode())
        said = {"endpoint": url, "completion_window": "1h"}
        return self.batches.create(CALLER, file.id, 3600, 6, **said).id

    def load(self, batch_id: str) -> BatchRecord:
        record = self.batches.load(batch_id)
        assert record is not None
        return record

    def prepare(self, batch_id: str) -> BatchRun:
        return BatchRun(self.gateway, self.load(batch_id))

    def run(self, batch_id: str) -> BatchRecord:
        """Runs a batch to its end."""
        asyncio.run(self.prepare(batch_id).run())
        return self.load(batch_id)

    def content(self, file_id: str | None) -> list[Any]:
        assert file_id is not None
        content = b"".join(self.files.read(OWNER, self.files.get(OWNER, file_id)))
        return list(map(json.loads, content.splitlines()))

    def contents(self) -> list[Path]:
        """What is in the folder of files."""
        return [path for path in self.folder.rglob("*") if path.is_file()]


class Route:
    """Answers requests for embeddings in the place of the gateway's route."""

    def __init__(self) -> None:
        #: Texts up to this length are answered, all others wait.
        self.longest = len(TEXTS)
        #: What the next requests raise.
        self.problems: list[Exception] = []
        self.is_asked = threading.Event()

    async def __call__(self, request: Request, body: Any) -> Response:
        assert request.state.caller.name == OWNER
        self.is_asked.set()
        if self.problems:
            raise self.problems.pop()
        while len(body.input) > self.longest:
            await asyncio.sleep(0.01)
        return ANSWER


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Route:
    made = Route()
    kind, form, _ = ROUTES[EMBEDDINGS]
    monkeypatch.setitem(ROUTES, EMBEDDINGS, (kind, form, made))
    return made


@pytest.fixture
def room(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    # Two requests in a slice.
    monkeypatch.setattr("batchery_producer.gateway.batches.requests.SLICE_JOBS", 2)
    monkeypatch.setattr(runs, "LOOK_S", 0.02)
    return Room(url, tmp_path / "files")


def check_whole(room: Room, batch_id: str) -> None:
    record = room.load(batch_id)
    assert (record.status, record.request_counts.completed) == (Status.COMPLETED, len(TEXTS))
    lines = room.content(record.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"r-{n}" for n in range(len(TEXTS))]
    assert {line["response"]["status_code"] for line in lines} == {200}
    assert record.usage is not None
    assert record.usage.total_tokens == len(TEXTS)
    found, _ = room.files.page(OWNER, None, 10, newest_first=True, purpose="batch_output")
    assert [each.id for each in found] == [record.output_file_id]
    assert found[0].bytes == sum(map(len, room.files.read(OWNER, found[0])))


@pytest.mark.usefixtures("route")
def test_doubled_and_late_runs_leave_each_line_once_and_in_order(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    early = room.prepare(batch_id)

    async def run_all() -> None:
        await asyncio.gather(*(room.prepare(batch_id).run() for _ in range(3)))
        await early.run()

    asyncio.run(run_all())
    check_whole(room, batch_id)
    # Nothing is left of what one of them wrote in vain, but in the file's own folder.
    assert {path.parent.name for path in room.contents()} == {
        room.load(batch_id).input_file_id,
        room.load(batch_id).output_file_id,
    }


@pytest.mark.usefixtures("route")
def test_slice_that_could_not_be_written_is_written_by_the_next_run(room: Room) -> None:
    batch_id = room.create(*TEXTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.files.storage, "write", fail)
        with pytest.raises(DatasetError):
            room.run(batch_id)
    room.run(batch_id)
    check_whole(room, batch_id)


def fail(*_: Any) -> None:
    raise DatasetError("the disk is full")


def test_request_is_made_again_while_what_is_wrong_may_pass(room: Room, route: Route) -> None:
    route.problems = [
        Problem(kind, "come again", retry_after_s=0.01)
        for kind in (Kind.UNAVAILABLE, Kind.OVERLOADED, Kind.TIMEOUT, Kind.NOT_FOUND)
    ]
    batch_id = room.create(*TEXTS)
    room.run(batch_id)
    check_whole(room, batch_id)


def test_request_that_fails_has_the_status_of_its_route(room: Room, route: Route) -> None:
    route.problems = [Problem(Kind.BAD_GATEWAY, "the server failed")]
    record = room.run(room.create("a", "b"))
    counts = record.request_counts
    assert (record.status, counts.completed, counts.failed) == (Status.COMPLETED, 1, 1)
    (line,) = room.content(record.error_file_id)
    assert line["response"]["status_code"] == 502
    assert line["response"]["body"]["error"]["message"] == "the server failed"


def test_failure_of_the_gateway_itself_tells_nothing(room: Room, route: Route) -> None:
    route.problems = [OSError("/a/folder/of/ours")]
    record = room.run(room.create("a"))
    (line,) = room.content(record.error_file_id)
    assert line["response"]["status_code"] == 500
    assert "/a/folder" not in str(line)


def test_batch_file_has_whole_answers(room: Room) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"model": "chat", "messages": messages, "stream": True}
    record = room.run(room.create("a", url="/v1/chat/completions", **body))
    assert record.request_counts.failed == 1
    (line,) = room.content(record.error_file_id)
    assert line["response"]["status_code"] == 400
    assert "stream: batch files have whole" in line["response"]["body"]["error"]["message"]


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


def run_and_end(room: Room, batch_id: str, end: Any, completed: int) -> BatchRecord:
    """Runs a batch that is ended early, when so many requests have an answer."""

    async def run() -> None:
        running = asyncio.ensure_future(room.prepare(batch_id).run())
        while not (now := room.load(batch_id)).slices or now.request_counts.completed < completed:
            await asyncio.sleep(0.01)
        end(room, batch_id)
        await running

    asyncio.run(run())
    return room.load(batch_id)


@pytest.mark.parametrize(
    ("end", "status", "failed"),
    [(expire, Status.EXPIRED, 3), (cancel, Status.CANCELLED, 0)],
    ids=["expired", "cancelled"],
)
def test_batch_that_ends_early_keeps_what_was_done(
    room: Room, route: Route, end: Any, status: Status, failed: int
) -> None:
    batch_id = room.create(*TEXTS)
    route.longest = 3  # One slice, and a half.
    record = run_and_end(room, batch_id, end, 3)
    counts = record.request_counts
    assert (record.status, counts.completed, counts.failed) == (status, 3, failed)
    assert len(room.content(record.output_file_id)) == 3
    if failed:
        errors = [line["error"]["code"] for line in room.content(record.error_file_id)]
        assert errors == ["batch_expired"] * failed
    with pytest.raises(Problem, match="too late"):
        room.batches.cancel(OWNER, batch_id)


@pytest.mark.parametrize("end", [expire, cancel])
def test_batch_whose_model_has_gone_waits_and_can_end(
    room: Room, end: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = room.gateway.models.find
    monkeypatch.setattr(
        room.gateway.models,
        "find",
        # Only the reading of the file finds it.
        lambda name, kinds=None: (
            find(name, kinds)
            if threading.current_thread() is not threading.main_thread()
            else ServedModels({}).find("gone")
        ),
    )
    assert run_and_end(room, room.create(*TEXTS), end, 0).is_over


def test_batch_whose_input_is_gone_keeps_what_was_done(room: Room, route: Route) -> None:
    def remove(room: Room, batch_id: str) -> None:
        room.files.remove(OWNER, room.load(batch_id).input_file_id)
        route.longest = 2

    batch_id = room.create(*TEXTS)
    route.longest = 1
    run_and_end(room, batch_id, remove, 1)
    record = check_failed(room, batch_id, "file_not_found")
    assert record.request_counts.completed == 2
    assert len(room.content(record.output_file_id)) == 2


def test_batch_is_run_by_one_and_an_owner_s_are_some_at_a_time(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [room.create("a") for _ in range(3)]
    monkeypatch.setattr(jobs, "OWNER_RUNS", 2)
    begun: list[str] = []

    async def run_batch(_: Gateway, batch_id: str) -> None:
        begun.append(batch_id)
        room.batches.leave(batch_id)

    monkeypatch.setattr(jobs, "run_batch", run_batch)
    assert room.batches.take(ids[0])

    async def take() -> None:
        running: dict[str, asyncio.Task[None]] = {}
        await jobs.take_batches(room.gateway, running)
        assert list(running) == ids[1:]
        await asyncio.gather(*running.values())
        room.batches.leave(ids[0])
        # Those have ended.
        await jobs.take_batches(room.gateway, running)
        assert list(running) == ids[:2]
        await asyncio.gather(*running.values())

    asyncio.run(take())
    assert begun == [*ids[1:], *ids[:2]]


def test_worker_that_stops_leaves_its_batches_to_others(
    room: Room, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LOOK_S", 0.02)
    batch_id, is_over = room.create(*TEXTS), threading.Event()
    route.longest = 2

    async def work() -> None:
        working = asyncio.ensure_future(jobs.run_batches(room.app, is_over))
        while room.load(batch_id).request_counts.completed < 2:
            await asyncio.sleep(0.01)
        is_over.set()
        await working

    asyncio.run(work())
    assert room.load(batch_id).status is Status.IN_PROGRESS
    route.longest = len(TEXTS)
    assert room.batches.take(batch_id)
    room.run(batch_id)
    check_whole(room, batch_id)


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


def test_file_that_cannot_be_removed_stays_known(room: Room) -> None:
    file = room.upload(b"stuck")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room.files.storage, "remove", fail)
        with pytest.raises(DatasetError):
            room.files.remove(OWNER, file.id)
    assert room.files.get(OWNER, file.id).bytes == 5
    room.files.remove(OWNER, file.id)
    assert room.contents() == []


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
