import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchery_producer.gateway.batches.records import Batch, BatchRecord, FileObject, Status, new_id
from batchery_producer.gateway.batches.storage import Storage
from batchery_producer.gateway.batches.store import BatchPlace, BatchStore, FileStore, owner_of
from batchery_producer.gateway.callers import Caller
from batchery_producer.gateway.problems import Problem

OWNER = "tenant-acme"


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(Storage(str(tmp_path)))


@pytest.fixture
def batches(tmp_path: Path) -> BatchStore:
    return BatchStore(Storage(str(tmp_path)))


def upload(
    files: FileStore, content: bytes = b"content", expires_s: int | None = None
) -> FileObject:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 3):
            yield content[start : start + 3]

    return asyncio.run(files.upload(OWNER, "n" * 300, chunks(), expires_s))


def record(file_id: str = "file-1", status: Status = Status.VALIDATING) -> BatchRecord:
    batch = Batch(
        id=new_id("batch_"),
        endpoint="/v1/embeddings",
        input_file_id=file_id,
        completion_window="24h",
        created_at=1,
        expires_at=2,
        status=status,
    )
    facts = {"run": "0" * 16, "window": 1, "output_id": "file-2", "error_id": "file-3"}
    return BatchRecord.model_validate(
        {"batch": batch, "owner": OWNER, "tenant": None, "priority": 6, **facts}
    )


def caller(name: str, tenant: str | None) -> Caller:
    return Caller(name, tenant, None, 1, 1, 1)


def test_owner_is_the_tenant_and_a_plain_name_of_a_folder() -> None:
    assert owner_of(caller("new", "acme")) == owner_of(caller("old", "acme")) == "tenant-acme"
    assert owner_of(caller("acme", None)) == owner_of(caller("acme", "")) == "key-acme"
    odd = [owner_of(caller("a", tenant)) for tenant in ("..", "a/b", "a,b", "ü" * 200, "é" * 200)]
    assert len(set(odd)) == 5
    assert all(set("/,").isdisjoint(each) and len(each) < 200 for each in odd)


def test_uploaded_file_is_kept_whole_under_a_short_name(files: FileStore) -> None:
    file = upload(files)
    assert (file.bytes, len(file.filename), file.expires_at) == (7, 255, None)
    assert files.get(OWNER, file.id) == file
    with files.open(OWNER, file.id) as opened:
        assert opened.read() == b"content"


def test_upload_that_fails_leaves_nothing(files: FileStore, tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"half"
        raise EOFError

    with pytest.raises(EOFError):
        asyncio.run(files.upload(OWNER, "a", chunks(), None))
    with pytest.raises(Problem, match="file: empty"):
        upload(files, b"")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("wrong", ["", "file-1", "../x", "file-" + "0" * 46, "batch_" + "0" * 46])
def test_id_of_no_file_is_told(files: FileStore, wrong: str) -> None:
    with pytest.raises(Problem, match="no such file"):
        files.get(OWNER, wrong)


def test_file_whose_time_is_over_is_gone(
    files: FileStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept, short = upload(files), upload(files, expires_s=3600)
    assert short.expires_at == short.created_at + 3600
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3601)
    found, _ = files.page(OWNER, None, 10, newest_first=True, purpose=None)
    assert [each.id for each in found] == [kept.id]
    assert not list(tmp_path.rglob(f"{short.id}*"))


def test_pages_follow_each_other_even_where_a_file_is_gone(files: FileStore) -> None:
    ids = [upload(files).id for _ in range(5)]

    def page(after: str | None, *, newest_first: bool = True) -> tuple[list[str], bool]:
        found, more = files.page(OWNER, after, 2, newest_first=newest_first, purpose="batch")
        return [each.id for each in found], more

    assert page(None) == ([ids[4], ids[3]], True)
    files.delete(OWNER, ids[3])
    assert page(ids[3]) == ([ids[2], ids[1]], True)
    assert page(ids[1]) == ([ids[0]], False)
    assert page(None, newest_first=False) == ([ids[0], ids[1]], True)
    assert page(ids[1], newest_first=False) == ([ids[2], ids[4]], False)
    assert files.page(OWNER, None, 2, newest_first=True, purpose="other") == ([], False)
    assert files.page("tenant-other", None, 2, newest_first=True, purpose=None) == ([], False)


def test_batch_is_open_until_it_is_closed(batches: BatchStore) -> None:
    made = record()
    batches.add(made)
    assert batches.open_batches() == [BatchPlace(OWNER, made.id)]
    assert batches.get(OWNER, made.id) == made
    assert batches.uses(OWNER, "file-1") == made.id
    assert batches.uses("tenant-other", "file-1") is None
    batches.close(made)
    assert batches.open_batches() == []
    assert batches.get(OWNER, made.id) == made
    with pytest.raises(Problem, match="no such batch"):
        batches.get("tenant-other", made.id)


def test_batch_that_was_never_kept_is_forgotten(
    batches: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, kept = record(), record()
    batches.storage.write(f"open/{OWNER},{lost.id}", b"{}")
    batches.add(kept)
    batches.forget_lost(BatchPlace(OWNER, lost.id))
    assert len(batches.open_batches()) == 2
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3601)
    for each in (lost, kept):
        batches.forget_lost(BatchPlace(OWNER, each.id))
    assert batches.open_batches() == [BatchPlace(OWNER, kept.id)]


def test_batch_that_is_to_be_cancelled_says_so_at_once(batches: BatchStore) -> None:
    made = record()
    batches.add(made)
    assert batches.seen(made).status is Status.VALIDATING
    batches.cancel(made)
    at_s = batches.cancelled_at(made)
    batches.cancel(made)
    seen = batches.seen(batches.get(OWNER, made.id))
    assert (seen.status, seen.cancelling_at) == (Status.CANCELLING, at_s)
    # Too late for a batch whose files are being made.
    late = made.with_batch(made.batch.model_copy(update={"status": Status.FINALIZING}))
    assert batches.seen(late).status is Status.FINALIZING
