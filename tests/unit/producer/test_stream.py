"""Which jobs are sent, and in which order their answers go on."""

from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from batchery_producer import stream
from batchery_producer.answers import Answer
from batchery_producer.stream import ItemRun, NewJob, Stream


class Peer:
    """A broker, and a backend, in which the first of `ends` has the results that come next."""

    sent = 0

    def __init__(self) -> None:
        self.headers: dict[str, Any] = {}
        self.awaited: list[str] = []
        self.ends: list[int] = []

    def expect(self, task_ids: Iterable[str]) -> None:
        self.awaited += task_ids

    def send(self, jobs: list[Any], _: object) -> None:
        self.sent += len(jobs)

    def collect(self, _: float) -> Iterator[tuple[str, Answer]]:
        for place in [self.ends.pop(0)] if self.ends and self.awaited else []:
            task_id = self.awaited.pop(place % len(self.awaited))
            yield task_id, Answer(task_id)

    def forget(self, _: list[str]) -> None:
        pass

    def close(self) -> None:
        pass


@given(size=st.integers(1, 50), ends=st.lists(st.integers(0, 60), max_size=200))
def test_a_window_never_holds_more_jobs_than_its_size(size: int, ends: list[int]) -> None:
    peer: Any = Peer()
    peer.ends = ends
    run, serial = Stream[int](peer, peer, size), 0
    for _ in range(len(ends) + 3):
        jobs = [NewJob(f"job-{serial + n}", "item", 0, serial + n) for n in range(run.room())]
        serial += len(jobs)
        for task_id, number, answer in run.step(jobs, has_room=False):
            assert task_id == f"job-{number}" == answer.value
        assert list(run.in_flight) == peer.awaited
        assert len(run.in_flight) <= size


def test_a_window_of_no_job_is_refused() -> None:
    peer: Any = Peer()
    with pytest.raises(ValueError, match="must be 1 or more"):
        Stream(peer, peer, 0)


@given(ends=st.lists(st.integers(0, 9), min_size=30, max_size=30), size=st.integers(1, 9))
def test_outcomes_in_order_wait_for_those_of_older_items(ends: list[int], size: int) -> None:
    peer: Any = Peer()
    peer.ends = ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "Collector", lambda *_: peer)
        patch.setattr(stream, "Publisher", lambda *_, **__: peer)
        patch.setattr(stream, "BrokerConnection", lambda *_, **__: MagicMock())
        read, came = list[int](), list[int]()

        def items() -> Iterator[int]:
            for number in range(30):
                read.append(number)
                yield number

        app = Celery(set_as_current=False)
        for outcome in ItemRun(app, "task", {}, items(), ordered=True, window=size).outcomes():
            came.append(outcome.index)
            assert len(read) <= len(came) + size  # What waits for older items still counts.
    assert came == list(range(30))
