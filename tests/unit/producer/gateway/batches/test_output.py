from pathlib import Path

import pytest

from batchery_producer.files.journal import Done
from batchery_producer.files.openai_batch import EXPIRED, INVALID_LINE
from batchery_producer.files.records import Broken, Record
from batchery_producer.gateway.batches.leases import Lease, LeaseLost, Leases
from batchery_producer.gateway.batches.output import BatchOutput
from batchery_producer.gateway.batches.storage import Storage


class Clock:
    """A clock that stands still."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lease_of(token: str, clock: Clock) -> Lease:
    return Lease(Leases(None, clock=clock), "key", token, until_s=10)


def output_of(tmp_path: Path, lease: Lease, told: list[int] | None = None) -> BatchOutput:
    def flushed(done: Done) -> None:
        if told is not None:
            told.append(len(done))

    return BatchOutput(Storage(str(tmp_path)), "pieces", lease, is_resumed=True, flushed=flushed)


def test_another_process_goes_on_with_what_is_kept(tmp_path: Path, clock: Clock) -> None:
    told: list[int] = []
    first = output_of(tmp_path, lease_of("a", clock), told)
    first.result(Record(1, "one", None, form={"encoding_format": "base64"}), [1.0])
    first.failure(Broken(2, "two", "wrong"), INVALID_LINE, "body: wrong")
    assert told == []
    first.flush()
    first.result(Record(3, "three", None), [3.0])
    first.finish(complete=False)
    assert told == [2, 3]
    second = output_of(tmp_path, lease_of("b", clock))
    assert (second.done.succeeded, second.done.failed) == (2, 1)
    rows = [Record(line, str(line), "text") for line in range(1, 6)]
    assert [row.line for row in second.missing(rows)] == [4, 5]
    assert list(second.entries()) == [
        {"id": "one", "line": 1, "form": {"encoding_format": "base64"}, "result": [1.0]},
        {"id": "two", "line": 2, "error": {"type": "InvalidItem", "message": "body: wrong"}},
        {"id": "three", "line": 3, "result": [3.0]},
    ]
    second.expire(rows, "no time")
    last = list(second.entries())[-1]
    assert last["error"] == {"type": EXPIRED, "message": "no time"}
    assert (second.done.succeeded, second.done.failed) == (2, 3)


def test_line_counts_once_whoever_wrote_it(tmp_path: Path, clock: Clock) -> None:
    first, second = (output_of(tmp_path, lease_of(token, clock)) for token in "ab")
    for output, value in ((first, 1.0), (second, 2.0)):
        output.result(Record(1, "one", None), value)
        output.result(Record(1, "one", None), value + 10)
        output.flush()
    assert len(list((tmp_path / "pieces").iterdir())) == 2
    assert [entry["result"] for entry in second.entries()] == [1.0]


def test_process_without_its_lease_writes_nothing(tmp_path: Path, clock: Clock) -> None:
    output = output_of(tmp_path, lease_of("a", clock))
    output.result(Record(1, "one", None), [1.0])
    clock.now_s = 9
    with pytest.raises(LeaseLost):
        output.flush()
    assert not (tmp_path / "pieces").exists()


def test_text_with_half_a_character_is_kept(tmp_path: Path, clock: Clock) -> None:
    output = output_of(tmp_path, lease_of("a", clock))
    output.failure(Record(1, "one", None), "ValueError", "bad: \ud800")
    assert next(output.entries())["error"]["message"] == "bad: \ud800"
