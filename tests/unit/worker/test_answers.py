"""What a device says of a batch: as much as the main process still has to do."""

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st

from batchery import Failed
from batchery_worker.answers import Computed, answer, text_of
from batchery_worker.commit import Settled, Verdict
from batchery_worker.terms import Terms
from batchery_worker.wire import Work

backend = Celery("answers", broker="memory://", set_as_current=False).backend
JOBS = [("t1", ["a"], False), ("t2", ["b", "c"], True), ("t3", ["d"], False)]


class Judge:
    """Gives the verdicts that it was told to give."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = verdicts
        self.asked: list[tuple[Any, ...]] = []

    def commit(
        self, jobs: Sequence[Settled], terms: Terms, facts: Mapping[str, Any]
    ) -> Sequence[Verdict]:
        self.asked.append((jobs, terms, facts))
        return self.verdicts


def computed(terms: Terms | None, *outcomes: Any) -> Computed:
    work = Work(5, "task", {}, JOBS, 8, None, terms=terms)
    return Computed(work, outcomes, 1.5, 8, 10, prepare_ms=0.5, queued_ms=0.25)


def terms(text_chars: int | None = None) -> Terms:
    return Terms("w", "workers", "leases", 0, [("1", 0.0, {})] * 3, text_chars)


def test_without_terms_nothing_is_committed() -> None:
    judge = Judge()
    done = answer(computed(None, 1, 2, 3, 4), "cpu", judge, backend)
    assert not judge.asked
    assert done.jobs == [
        ("needs tracer", ("value", 1)),
        ("needs tracer", ("value", [{"ok": 2}, {"ok": 3}])),
        ("needs tracer", ("value", 4)),
    ]
    assert (done.id, done.forward_ms, done.tokens, done.computed_tokens) == (5, 1.5, 8, 10)
    assert (done.prepare_ms, done.queued_ms) == (0.5, 0.25)
    assert done.commit_ms >= 0


def test_only_what_the_tracer_needs_travels() -> None:
    judge = Judge(Verdict.COMMITTED, Verdict.NEEDS_TRACER, Verdict.FENCED)
    done = answer(computed(terms(), 1, 2, Failed("no"), 4), "cpu", judge, backend)
    assert [verdict for verdict, _ in done.jobs] == ["committed", "needs tracer", "fenced"]
    assert [len(rest) for _, rest in done.jobs] == [0, 2, 0]
    ((jobs, _, facts),) = judge.asked
    assert [job.task_id for job in jobs] == ["t1", "t2", "t3"]
    assert facts == {
        "id": "b5",
        "size": 4,
        "padding": 0.2,
        "prepare_ms": 0.5,
        "queued_ms": 0.25,
        "forward_ms": 1.5,
        "device": "cpu",
    }


def test_readers_get_the_beginning_of_a_result() -> None:
    judge = Judge(Verdict.COMMITTED, Verdict.COMMITTED, Verdict.FENCED)
    done = answer(computed(terms(20), "x" * 100, 2, 3, 4), "cpu", judge, backend)
    assert [len(rest) for _, rest in done.jobs] == [1, 1, 0]
    assert done.jobs[0][1][0].startswith("'xxxx")
    assert len(done.jobs[0][1][0]) < 30


Plain = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=60,
)


@given(value=Plain, chars=st.integers(1, 60))
def test_the_text_of_a_result_is_celery_s_own(value: Any, chars: int) -> None:
    assert text_of(value, chars) == saferepr(value, chars)


def test_the_text_of_a_vector_is_celery_s_own() -> None:
    result = {"tokens": 7, "vector": [number / 7 for number in range(384)]}
    assert text_of(result, 128) == saferepr(result, 128)
    zeros = {"vector": [0] * 384}
    assert text_of(zeros, 128) == saferepr(zeros, 128)
