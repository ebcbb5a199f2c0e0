"""What becomes of the jobs of a batch: their results, and what Celery still has to do."""

import enum
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from celery import Celery
from celery.utils.saferepr import saferepr
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils import json as celery_json

from batchery import Failed, Replace
from batchery.errors import UnserialisableResult
from batchery_worker.batch import DeviceBatch
from batchery_worker.commit.committer import CommitStatus, JobResult, RedisCommitter
from batchery_worker.completion.tracer import own_outcome
from batchery_worker.device.answerer import describe, format_result, send_results, write_json
from batchery_worker.job import Batch
from batchery_worker.plain_values import Encoded, Vector, plain_json
from batchery_worker.result_cache import DedupedBatch, ResultCache, SingleFlight
from batchery_worker.work import CachePolicy, CommitContext, Work

#: What the scheduler knows of the jobs, which is not asked for.
NO_JOBS: Batch[Any] = Batch(())

app = Celery("answers", broker="memory://", set_as_current=False)
backend = app.backend
TASK: Any = None
NO_CACHE = SingleFlight(ResultCache(backend))
JOBS = [("t1", ["a"], False), ("t2", ["b", "c"], True), ("t3", ["d"], False)]


class Judge(RedisCommitter):
    """Gives the statuses that it was told to give."""

    def __init__(self, *statuses: CommitStatus) -> None:
        self.statuses = statuses
        self.asked: list[tuple[Any, ...]] = []

    def send(
        self, jobs: Sequence[JobResult], context: CommitContext, info: Mapping[str, Any]
    ) -> Callable[[], Sequence[CommitStatus]]:
        self.asked.append((jobs, context, info))
        return lambda: self.statuses


def answer(batch: DeviceBatch, judge: RedisCommitter, reuse: SingleFlight) -> None:
    send_results(batch, "cpu", judge, reuse)()


def computed(context: CommitContext | None, *outcomes: Any) -> DeviceBatch:
    work = Work(5, "task", {}, JOBS, 8, None, commit=context)
    return DeviceBatch(
        *(TASK, work, NO_JOBS),
        prepare_ms=0.5,
        outcomes=outcomes,
        forward_ms=1.5,
        tokens=8,
        computed_tokens=10,
        queued_ms=0.25,
    )


def context(text_chars: int | None = None) -> CommitContext:
    store: Any = None
    return CommitContext(store, [("1", 0.0, {})] * 3, text_chars)


Plain = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=60,
)


@given(value=Plain, chars=st.integers(1, 60))
def test_the_text_of_a_result_is_celery_s_own(value: Any, chars: int) -> None:
    assert format_result(value, chars) == saferepr(value, chars)


@given(value=st.lists(Plain | st.text(min_size=100), min_size=1), chars=st.integers(1, 30))
def test_the_text_of_an_encoded_result_begins_as_celery_s_own(value: Any, chars: int) -> None:
    result = Encoded(plain_json(value))
    # Where Celery leaves something out, it goes on with what is behind it.
    ours, celery_s = (
        text[:chars].partition("...")[0]
        for text in (format_result(result, chars), saferepr(result.value, chars))
    )
    assert ours == celery_s


def test_the_text_of_a_vector_is_celery_s_own() -> None:
    result = {"tokens": 7, "vector": [number / 7 for number in range(384)]}
    assert format_result(result, 128) == saferepr(result, 128)
    zeros = {"vector": [0] * 384}
    assert format_result(zeros, 128) == saferepr(zeros, 128)


class Memory:
    """A cache in the place of Redis."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def put(self, _: str, results: Mapping[bytes, bytes], __: float) -> None:
        self.kept.update(results)

    def take_errors(self) -> dict[str, Any]:
        return {}


def deduplicated(outcomes: Mapping[str, Any], found: Mapping[bytes, bytes]) -> DeviceBatch:
    """A batch of `a`, packed `a` and `b`, and `d`: each outcome computed, or found."""
    items = ["a", "a", "b", "d"]
    jobs = [("t1", ["a"], False), ("t2", ["a", "b"], True), ("t3", ["d"], False)]
    cache = CachePolicy("1", 60)
    work = Work(5, "task", {}, jobs, 8, None, commit=context(100), cache=cache)
    deduped = DedupedBatch([item.encode() for item in items], found)
    chosen = [items[place] for place in deduped.positions]
    computed = deduped.run(chosen, {}, lambda part: [outcomes[item] for item in part])
    return DeviceBatch(TASK, work, NO_JOBS, deduped=deduped, outcomes=computed)


def test_a_value_of_several_jobs_is_encoded_once_and_kept() -> None:
    judge, memory = Judge(*[CommitStatus.COMMITTED] * 3), Memory()
    batch = deduplicated({"a": {"x": 1}, "b": [2.5]}, {b"d": b'"stored"'})
    answer(batch, judge, SingleFlight(memory))  # type: ignore[arg-type]
    ((jobs, _, _),) = judge.asked
    assert [job.json for job in jobs] == [
        b'{"x":1}',
        b'[{"ok":{"x":1}},{"ok":[2.5]}]',
        b'"stored"',
    ]
    assert [each.text for each in batch.answers] == [
        "{'x': 1}",
        "[{'ok': {'x': 1}}, {'ok': [2.5]}]",
        "'stored'",
    ]
    assert memory.kept == {b"a": b'{"x":1}', b"b": b"[2.5]"}
    assert batch.reused == {"items": 4, "hits": 1, "deduplicated": 1, "computed": 2}


def vector(*numbers: float) -> Encoded:
    """A result with a vector."""
    return Encoded(b'{"vector":', Vector(np.array(numbers, np.float32)), b"}")


#: 0.1 as float32.
PACKED = b"zczMPQ=="


@pytest.mark.parametrize("outcome", [vector(0.1), Encoded.load(vector(0.1).dump())])
def test_a_vector_is_written_as_the_producer_of_each_job_reads_it(outcome: Encoded) -> None:
    jobs = [("t1", ["a"], False), ("t2", ["b"], False), ("t3", ["c", "d"], True)]
    jobs += [("t4", ["e", "f"], True), ("t5", ["g"], False)]
    store: Any = None
    context = CommitContext(store, [("1", 0.0, {})] * 5, 100, packed={1, 3, 4})
    work = Work(5, "task", {}, jobs, 8, None, commit=context)
    outcomes = [outcome, outcome, outcome, outcome, outcome, Failed("no"), {"vector": "text"}]
    batch = DeviceBatch(TASK, work, NO_JOBS, outcomes=outcomes)
    judge = Judge(*[CommitStatus.COMMITTED] * 4, CommitStatus.NEEDS_TRACER)
    answer(batch, judge, NO_CACHE)
    ((results, _, _),) = judge.asked
    plain, packed = b'{"vector":[0.1]}', b'{"vector":"%b"}' % PACKED
    failed = b'{"error":{"type":"ItemFailed","message":"no"}}'
    assert [(each.json, each.is_packed) for each in results] == [
        (plain, False),
        (packed, True),
        (b'[{"ok":%b},{"ok":%b}]' % (plain, plain), False),
        (b'[{"ok":%b},%b]' % (packed, failed), True),
        # What a function returns is its own.
        (b'{"vector":"text"}', False),
    ]
    assert batch.failed_items == {"ItemFailed": 1}
    # Logs and events tell of a packed result as of all others.
    assert [each.text for each in batch.answers][:2] == ["{'vector': [0.1]}"] * 2


def test_the_tracer_gets_numbers_where_a_packed_result_was_not_taken() -> None:
    store: Any = None
    context = CommitContext(store, [("1", 0.0, {})] * 3, packed={0, 1, 2})
    work = Work(5, "task", {}, JOBS, 8, None, commit=context)
    batch = DeviceBatch(TASK, work, NO_JOBS, outcomes=[vector(0.1)] * 4)
    answer(batch, Judge(*[CommitStatus.NEEDS_TRACER] * 3), NO_CACHE)
    one, two, _ = [own_outcome(each.outcome) for each in batch.answers]
    assert one == {"vector": [0.1]}
    assert two == [{"ok": one}, {"ok": one}]


def test_the_tracer_gets_what_it_would_have_got_without_a_cache() -> None:
    judge, memory = Judge(*[CommitStatus.NEEDS_TRACER] * 3), Memory()
    batch = deduplicated({"a": "A", "b": Failed(LookupError("b"))}, {b"d": b'{"y": null}'})
    answer(batch, judge, SingleFlight(memory))  # type: ignore[arg-type]
    assert [own_outcome(each.outcome) for each in batch.answers] == [
        "A",
        [{"ok": "A"}, {"error": {"type": "LookupError", "message": "b"}}],
        {"y": None},
    ]
    assert memory.kept == {b"a": b'"A"'}


def test_failed_items_of_multi_item_jobs_are_counted_by_class_of_their_error() -> None:
    good = computed(None, Failed("not in a multi-item job"), 2, 3, 4)
    answer(good, Judge(), NO_CACHE)
    assert good.failed_items == {}
    # A set is no JSON, so it becomes a failure.
    batch = computed(None, 1, Failed(LookupError("b")), {3}, 4)
    answer(batch, Judge(), NO_CACHE)
    assert batch.failed_items == {
        "LookupError": 1,
        "UnserialisableResult": 1,
    }


@given(st.lists(st.integers() | st.text(), min_size=1, max_size=5), st.data())
def test_plain_values_are_one_list_whoever_encoded_them(values: list[Any], data: Any) -> None:
    outcomes = [
        Encoded(plain_json(value)) if data.draw(st.booleans()) else value for value in values
    ]
    work = Work(5, "task", {}, [("t1", values, "values")], 8, None)
    batch = DeviceBatch(TASK, work, NO_JOBS, outcomes=outcomes)
    answer(batch, Judge(), NO_CACHE)
    [given] = batch.answers
    assert own_outcome(given.outcome) == values
    assert batch.failed_items == {}


def test_first_failure_is_that_of_a_job_of_plain_values() -> None:
    work = Work(5, "task", {}, [("t1", [1, 2, 3], "values")], 8, None)
    outcomes = [Encoded(b"1"), Failed(LookupError("b")), Failed("later")]
    batch = DeviceBatch(TASK, work, NO_JOBS, outcomes=outcomes)
    answer(batch, Judge(), NO_CACHE)
    failed = batch.answers[0].outcome
    assert (type(failed.exception), str(failed.exception)) == (LookupError, "b")
    assert batch.failed_items == {}


@pytest.mark.parametrize(
    ("tokens", "computed_tokens", "padding"), [(75, 100, 0.25), (0, 0, 0.0), (100, 100, 0.0)]
)
def test_padding_is_the_part_of_the_computed_tokens_that_carried_nothing(
    tokens: int, computed_tokens: int, padding: float
) -> None:
    batch = computed(None)
    batch.tokens, batch.computed_tokens, batch.prepare_ms = tokens, computed_tokens, 0.12345
    facts = describe(batch, "cpu")
    assert (facts["id"], facts["size"]) == ("b5", 4)
    assert (facts["padding"], facts["prepare_ms"]) == (padding, 0.123)
    assert "version" not in facts


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ([1, 2.5, "größer", None], [1, 2.5, "größer", None]),
        ({"at": datetime(2026, 1, 2, tzinfo=UTC)}, {"at": datetime(2026, 1, 2, tzinfo=UTC)}),
        (Decimal("1.10"), Decimal("1.10")),
        (b"\x00\xff", b"\x00\xff"),
        (OrderedDict(a=1), {"a": 1}),
        ({1: "one", None: "none"}, {"1": "one", "null": "none"}),
        (Colour.RED, "red"),
        ({"score": np.float64(0.5)}, {"score": 0.5}),
        ([2**70], [2**70]),
    ],
)
def test_results_are_written_as_celery_s_json_reads_them(value: Any, read: Any) -> None:
    written = write_json(value)
    assert isinstance(written, bytes)
    assert celery_json.loads(written) == read


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "object"),
        ({1, 2}, "set"),
        (1j, "complex"),
        ({(1, 2): "tuple as key"}, "tuple"),
        ({"score": np.float32(0.5)}, "float32"),
        ([{"count": np.int64(3)}], "int64"),
        ([[np.zeros(2)]], "ndarray"),
        (bytearray(b"buffer"), "bytearray"),
        ([10**5000], "list"),
    ],
)
def test_value_that_cannot_be_written_fails_and_names_its_type(value: Any, name: str) -> None:
    outcome = write_json(value)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, UnserialisableResult)
    assert name in str(outcome.exception)


def test_recursive_and_too_deep_values_fail() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep):
        outcome = write_json(value)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.exception, UnserialisableResult)
    while deep:  # or the interpreter would recurse to free it
        deep = deep.pop()


def test_a_replacement_that_cannot_be_written_fails() -> None:
    signature = app.signature("other", args=(object(),))
    outcome = write_json(Replace(signature))
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, UnserialisableResult)
    assert "Replace(other(" in str(outcome.exception)
    assert write_json(Replace(app.signature("other"))) is None
