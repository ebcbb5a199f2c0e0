import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchery import DatasetError
from batchery.retry import Interrupted
from batchery_producer.files.dataset import FIRST_ROWS, Dataset, Feed, begin_reading


def take_all(feed: Feed[int], most: int = 7) -> list[int]:
    taken: list[int] = []
    deadline_s = time.monotonic() + 20
    while not feed.exhausted:
        assert time.monotonic() < deadline_s
        taken += feed.take(most, wait_s=0.1)
    return taken


def test_feed_returns_each_entry_once_and_in_order() -> None:
    assert take_all(Feed(range(1000), ahead=10)) == list(range(1000))


def test_feed_reads_no_further_ahead_than_its_maximum() -> None:
    read: list[int] = []
    blocked = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            if number == 6:
                blocked.set()
            yield number

    feed = Feed(source(), ahead=5)
    assert feed.take(1, wait_s=10) == [0]
    assert blocked.wait(10)
    assert len(read) <= 7
    feed.close()


def test_feed_returns_what_is_there_while_its_source_waits() -> None:
    gate = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        gate.wait(20)
        yield 2

    feed = Feed(source(), ahead=5)
    assert feed.take(9, wait_s=10) == [1]
    assert feed.take(9) == []
    assert not feed.exhausted
    gate.set()
    assert take_all(feed) == [2]


def test_feed_raises_an_error_after_the_entries_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    feed = Feed(source(), ahead=5)
    assert feed.take(1, wait_s=10) == [1]
    with pytest.raises(OSError, match="the disk is gone"):
        take_all(feed)


def test_feed_closes_its_source_on_the_reading_thread() -> None:
    threads: list[int] = []
    closed = threading.Event()

    def source() -> Iterator[int]:
        threads.append(threading.get_ident())
        try:
            yield from range(100)
        finally:
            threads.append(threading.get_ident())
            closed.set()

    held = source()
    feed = Feed(held, ahead=5)
    assert feed.take(1, wait_s=10) == [0]
    feed.close()
    assert closed.wait(20)
    assert threads[0] == threads[1] != threading.get_ident()


def test_reading_begins_if_one_of_the_first_rows_has_the_field(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"no": 1}\n' * (FIRST_ROWS - 1) + '{"text": "a"}\n{"no": 2}\n')
    rows = begin_reading(Dataset(path, field="text"), lambda: False)
    assert rows is not None
    assert [row.line for row in rows] == list(range(1, FIRST_ROWS + 2))
    path.write_text('{"no": 1}\n' * FIRST_ROWS + '{"text": "a"}\n')
    with pytest.raises(
        DatasetError, match=r"line 100: no field 'text'; fields: 'no'; so far no row of 100"
    ):
        begin_reading(Dataset(path, field="text"), lambda: False)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("in.jsonl", b"not JSON\nnor this\n", "line 1: not JSON: .*; of the first 2 rows, 2"),
        ("in.jsonl", b'[{"text": "a"}]\n', "line 1: a JSON list; .*jq .* makes lines of a list"),
        ("in.csv", b"id;text\n1;gr\xfc\xdfe\n2;\xfcber\n3;auf\n", "line 2: not UTF-8; .*latin-1"),
        ("in.csv", b'id,text\n1,"a\n2,"b\n', "line 2: not CSV: .*check --format, --encoding and"),
    ],
)
def test_reading_does_not_begin_if_most_of_the_first_rows_cannot_be_read(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=why):
        begin_reading(Dataset(path), lambda: False)


def test_reading_begins_if_half_of_the_first_rows_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("not JSON\nnor this\n" + '{"text": "a"}\n{"no": 1}\n')
    rows = begin_reading(Dataset(path), lambda: False)
    assert rows is not None
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_reading_does_not_begin_without_a_row(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("\n\n")
    with pytest.raises(DatasetError, match="empty; there is nothing"):
        begin_reading(Dataset(path), lambda: False)
    path.write_text("a\n")
    with pytest.raises(DatasetError, match=r"line 1: a bare string; it has no fields"):
        begin_reading(Dataset(path, field="text"), lambda: False)
    with pytest.raises(Interrupted):
        begin_reading(Dataset(path), lambda: True)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("b.jsonl", b'{"one": "a", "two": "b"}\n', "no field 'text' in the first row"),
        ("b.csv", b"id,id\n1,2\n", "names a column twice"),
        ("b.csv", "id,text\n".encode("utf-16"), "UTF-16"),
        ("b.parquet", b"no table at all, but long enough to be one", "cannot be read"),
        ("b.txt", b"\x1f\x8bgarbage", "cannot be read"),
    ],
)
def test_reading_does_not_begin_if_a_later_file_would_end_it(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    rows = "".join(f'{{"text": "a", "id": {number}}}\n' for number in range(FIRST_ROWS))
    (tmp_path / "a.jsonl").write_text(f"not JSON\n{rows}")
    (tmp_path / name).write_bytes(content)
    names = [tmp_path / "a.jsonl", tmp_path / name]
    with pytest.raises(DatasetError, match=why):
        begin_reading(Dataset(names), lambda: False)
    (tmp_path / "b.txt").write_text("one\n")
    dataset = Dataset([tmp_path / "a.jsonl", tmp_path / "b.txt"])
    assert len(list(begin_reading(dataset, lambda: False))) == FIRST_ROWS + 2
    assert "the item is 'text', the id is 'id'" in dataset.description
    assert dataset.total == FIRST_ROWS + 2
    # A part of the rows may need none of it.
    next(begin_reading(Dataset(names, limit=2), lambda: False))
