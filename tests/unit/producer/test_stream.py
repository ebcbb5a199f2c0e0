import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery.protocol.headers import HEADER, VERSION
from batchery_producer.answers import Answer
from batchery_producer.client import ItemSource
from batchery_producer.collector import Collector
from batchery_producer.publisher import Publisher
from batchery_producer.stream import SEND_JOBS, NewJob, Stream, Window

Numbers = Window[str, int, str]


@given(size=st.integers(1, 50), steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60))))
def test_window_never_holds_more_jobs_than_its_size(
    size: int, steps: list[tuple[bool, int]]
) -> None:
    window = Numbers(size)
    expected: dict[str, int] = {}
    serial = 0
    for sends, count in steps:
        if sends:
            jobs = {f"job-{serial + n}": serial + n for n in range(count)}
            serial += count
            if count > window.free:
                with pytest.raises(ValueError, match="free"):
                    window.add(jobs)
            else:
                window.add(jobs)
                expected |= jobs
        else:
            for task_id in window.in_flight[:count]:
                assert list(window.end(task_id, "x")) == [(task_id, expected.pop(task_id), "x")]
        assert window.in_flight == list(expected)
        assert len(window) + window.free == size
        assert 0 <= len(window) <= size


def test_window_of_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        Numbers(0)


@pytest.mark.parametrize("ordered", [False, True])
def test_window_job_that_has_ended_cannot_end_again(ordered: bool) -> None:
    window = Numbers(3, ordered=ordered)
    window.add({"a": 1, "b": 2})
    list(window.end("b", "x"))
    with pytest.raises(KeyError):
        list(window.end("b", "x"))


@given(order=st.permutations(range(9)))
def test_ordered_window_hands_jobs_on_in_the_order_of_sending(order: list[int]) -> None:
    window = Numbers(9, ordered=True)
    window.add({str(number): number for number in range(9)})
    handed_on: list[int] = []
    for count, number in enumerate(order, 1):
        handed_on += [ref for _, ref, _ in window.end(str(number), "x")]
        assert handed_on == list(range(len(handed_on)))
        assert len(window) == 9 - len(handed_on)  # What waits for older jobs still counts.
        assert len(window.in_flight) == 9 - count
    assert handed_on == list(range(9))


def test_window_empty_sends_all_that_fits() -> None:
    assert Numbers(5).to_send == 5
    assert Numbers(5 * SEND_JOBS).to_send == SEND_JOBS


def test_window_with_few_free_sends_nothing_until_an_eighth_is_free() -> None:
    window = Numbers(80)
    window.add({str(number): number for number in range(80)})
    for number in range(9):
        assert window.to_send == 0
        list(window.end(str(number), "x"))
    assert window.to_send == 0
    list(window.end("9", "x"))
    assert window.to_send == 10


class FakePublisher:
    def __init__(self) -> None:
        self.sent = 0
        self.calls: list[tuple[list[Any], Mapping[str, Any] | None]] = []

    def send(self, jobs: Sequence[tuple[str, Any]], headers: Mapping[str, Any] | None) -> None:
        self.calls.append(([item for _, item in jobs], headers))
        self.sent += len(jobs)


class FakeCollector(Collector):
    """Answers each job at the next look, with its own id."""

    headers: Mapping[str, Any] = {HEADER: {"v": VERSION, "reply": "here"}}

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.waits_s: list[float] = []
        self.forgotten: list[str] = []

    def expect(self, task_ids: Iterable[str]) -> None:
        self.waiting += task_ids

    def drop(self, task_ids: Iterable[str]) -> None:
        raise NotImplementedError

    def collect(self, wait_s: float) -> Iterator[tuple[str, Answer]]:
        self.waits_s.append(wait_s)
        while self.waiting and not wait_s:
            task_id = self.waiting.pop(0)
            yield task_id, Answer(task_id)

    def poll_all(self) -> Iterator[tuple[str, Answer]]:
        raise NotImplementedError

    def forget(self, task_ids: Sequence[str]) -> None:
        self.forgotten += task_ids

    def close(self) -> None:
        raise NotImplementedError


class ListSource:
    def __init__(self, jobs: Iterable[NewJob[int]]) -> None:
        self._jobs = list(jobs)

    @property
    def exhausted(self) -> bool:
        return not self._jobs

    def take(self, maximum: int, _wait_s: float) -> list[NewJob[int]]:
        taken, self._jobs = self._jobs[:maximum], self._jobs[maximum:]
        return taken


def stream_of(jobs: Iterable[NewJob[int]], size: int = 100, **options: Any) -> Any:
    """A stream whose publisher and collector are fakes, and these."""
    publisher, collector = FakePublisher(), FakeCollector()
    window = Window[str, int, Answer](size)
    made = Stream(collector, window, ListSource(jobs), cast(Publisher, publisher), **options)
    return made, publisher, collector


def singles(count: int) -> list[NewJob[int]]:
    return [NewJob(f"id-{number}", f"item {number}", 0, number) for number in range(count)]


def test_stream_yields_each_job_once_with_its_reference() -> None:
    made, _, _ = stream_of(singles(250), size=20)
    found = []
    while not made.is_done:
        found += [(task_id, ref, answer.value) for task_id, ref, answer in made.step()]
    assert found == [(f"id-{number}", number, f"id-{number}") for number in range(250)]


def test_stream_awaits_jobs_that_are_not_missing_without_sending_them() -> None:
    made, publisher, _ = stream_of(singles(4), missing=lambda ids: [ids[2]])
    assert len(list(made.step())) == 4
    assert [items for items, _ in publisher.calls] == [["item 2"]]


def test_stream_sends_jobs_of_different_size_with_their_own_header() -> None:
    jobs = [NewJob("a", [1, 2], 2, 0), NewJob("b", [3, 4], 2, 1), NewJob("c", [5], 1, 2)]
    made, publisher, _ = stream_of(jobs)
    list(made.step())
    reply = {"v": VERSION, "reply": "here"}
    assert publisher.calls == [
        ([[1, 2], [3, 4]], {HEADER: {**reply, "n": 2}}),
        ([[5]], {HEADER: {**reply, "n": 1}}),
    ]


def test_stream_waits_for_results_only_if_it_sent_nothing() -> None:
    made, _, collector = stream_of(singles(1), missing=lambda ids: ids)
    list(made.step())
    list(made.step(0.1))
    made.window.add({"older": 9})
    list(made.step(0.1))
    assert collector.waits_s == [0.0, 0.0, 0.1]


@pytest.mark.parametrize("keep", [False, True])
def test_stream_removes_discarded_results_with_the_next_flush(keep: bool) -> None:
    made, _, collector = stream_of(singles(3), keep_results=keep)
    for task_id, ref, _ in made.step():
        if ref != 1:
            made.discard(task_id)
    assert collector.forgotten == []
    made.flush()
    made.flush()
    assert collector.forgotten == ([] if keep else ["id-0", "id-2"])


def test_stream_is_due_for_a_flush_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    made, _, _ = stream_of([])
    assert not made.flush_is_due
    now_s += 1
    assert made.flush_is_due
    made.flush()
    assert not made.flush_is_due


def test_stream_with_jobs_in_flight_says_when_it_is_stalled() -> None:
    made, _, _ = stream_of([], timeout_s=0.0, explain=lambda: "nobody works")
    assert made.stalled() == ""
    made.window.add({"a": 1})
    assert made.stalled() == "no result for 0 s: nobody works"


def test_item_source_numbers_single_items() -> None:
    source = ItemSource("abc", 0)
    first = source.take(2, 0)
    assert [(job.item, job.item_count, job.ref) for job in first] == [
        ("a", 0, range(1)),
        ("b", 0, range(1, 2)),
    ]
    assert (source.taken, source.exhausted) == (2, False)
    assert [job.item for job in source.take(2, 0)] == ["c"]
    assert (source.taken, source.exhausted) == (3, True)


def test_item_source_makes_lists_and_the_last_may_be_shorter() -> None:
    source = ItemSource(range(5), 2)
    jobs = source.take(10, 0)
    assert [(job.item, job.item_count, job.ref) for job in jobs] == [
        ([0, 1], 2, range(2)),
        ([2, 3], 2, range(2, 4)),
        ([4], 1, range(4, 5)),
    ]
    assert len({job.id for job in jobs}) == 3
