"""The order of jobs within a lane: by deadline, and nobody waits for ever."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from batchery_worker.batching.shares import DUE_S, Flow
from batchery_worker.job import USUAL_LANE, BatchKey, Job, Limits

KEY = BatchKey("embed")

#: When a job comes after the one before, and in how many seconds it is due.
TIMES = st.lists(
    st.tuples(st.floats(0, 50), st.one_of(st.just(inf), st.floats(0.1, 200))), max_size=30
)


def job(name: str, arrived_s: float, deadline_s: float = inf, items: int = 1) -> Job[None]:
    return Job(name, KEY, Limits(8), items, arrived_s, None, deadline_s=deadline_s)


def flow_of(*jobs: Job[None]) -> Flow[None]:
    flow: Flow[None] = Flow(KEY, USUAL_LANE)
    for each in jobs:
        flow.add(each)
    return flow


def popped(flow: Flow[None]) -> list[str]:
    names = []
    while flow:
        first = flow.first()
        assert flow.pop() is first
        names.append(first.id)
    return names


def test_equal_deadlines_keep_their_order() -> None:
    assert popped(flow_of(*(job(str(number), number, 9) for number in range(5)))) == list("01234")


def test_jobs_whose_deadline_was_over_when_they_came_hold_nobody_up_for_longer() -> None:
    flow = flow_of(job("old", 0))
    names = []
    # One comes each second, as from a caller that sends seconds where a time is expected.
    for now_s in range(2 * int(DUE_S)):
        flow.add(job(str(now_s), now_s, -1e9))
        names.append(flow.pop().id)
    assert names.index("old") == DUE_S


@given(TIMES)
def test_jobs_go_by_the_time_at_which_they_are_due(times: list[tuple[float, float]]) -> None:
    now_s, jobs = 0.0, []
    for number, (gap_s, due_s) in enumerate(times):
        now_s += gap_s
        jobs.append(job(str(number), now_s, now_s + due_s, items=1 + number % 3))
    flow = flow_of(*jobs)
    assert len(flow) == len(jobs)
    assert flow.items == sum(each.items for each in jobs)
    assert sorted(each.id for each in flow) == sorted(each.id for each in jobs)
    if jobs:
        assert flow.oldest_s == min(each.arrived_s for each in jobs)
    due = {each.id: min(each.deadline_s, each.arrived_s + DUE_S) for each in jobs}
    order = [due[name] for name in popped(flow)]
    assert order == sorted(order)
    assert flow.items == 0


def test_jobs_are_taken_out_by_what_they_are() -> None:
    jobs = [job("a", 0), job("b", 0, 5, items=2), job("c", 0, 9), job("d", 0)]
    flow = flow_of(*jobs)
    assert [each.id for each in flow.take(lambda each: each.deadline_s < 6)] == ["b"]
    assert (len(flow), flow.items) == (3, 3)
    assert flow.take(lambda each: each is jobs[0]) == [jobs[0]]
    assert popped(flow) == ["c", "d"]


def test_oldest_job_is_known_whatever_was_added_or_has_gone() -> None:
    flow = flow_of(job("b", 2, 9), job("a", 1, 20))
    assert flow.oldest_s == 1
    # The one that is due first is not the oldest.
    flow.pop()
    assert flow.oldest_s == 1
    flow.add(job("c", 3, 8))
    flow.add(job("d", 4))
    assert flow.oldest_s == 1
    flow.take(lambda each: each.id == "a")
    assert flow.oldest_s == 3
    flow.pop()
    assert flow.oldest_s == 4
    flow.add(job("e", 5, 6))
    assert flow.oldest_s == 4
