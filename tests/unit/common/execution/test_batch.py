"""Batch functions and models: culprits found, mates spared, order kept."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchery import (
    Failed,
    Ignore,
    Model,
    OutOfMemory,
    Partial,
    Reject,
    RetryAfter,
    WrongLength,
)
from batchery.execution.batch import compute, prepare, read_back, run_function
from batchery.execution.bisect_failures import has_run_out, isolate


def refuse(bad: set[int], calls: list[int]) -> Callable[[Sequence[int]], list[int]]:
    def function(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        for item in items:
            if item in bad:
                raise LookupError(f"item {item}")
        return [2 * item for item in items]

    return function


@given(data=st.data(), size=st.integers(1, 130))
def test_bad_items_fail_alone_at_any_position(data: st.DataObject, size: int) -> None:
    bad = data.draw(st.sets(st.integers(0, size - 1)))
    calls: list[int] = []
    outcomes = isolate(refuse(bad, calls), range(size), name="f")
    for item, outcome in enumerate(outcomes):
        if item in bad:
            assert isinstance(outcome, Failed)
            assert str(outcome.exception) == f"item {item}"
        else:
            assert outcome == 2 * item
    # One call for the batch, then two halves at each level on the way to each culprit.
    levels = ceil(log2(size)) if size > 1 else 0
    assert len(calls) <= min(1 + 2 * levels * len(bad), 2 * size - 1)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([1], "1 outcome for 3"),
        ([], "0 outcomes for 3"),
        ([1, 2, 3, 4], "4 outcomes for 3"),
        ((n for n in range(2)), "2 outcomes for 3"),
        (np.zeros((2, 3)), "2 outcomes for 3"),
        ("abc", "a str for 3"),
        (b"abc", "a bytes for 3"),
        ({1: 1, 2: 2, 3: 3}, "a dict for 3"),
        ({"a", "b", "c"}, "a set for 3"),
        (None, "a NoneType for 3"),
        (3, "a int for 3"),
    ],
)
def test_answer_of_wrong_type_or_length_fails_all_items_and_names_both_lengths(
    answer: Any, found: str
) -> None:
    calls = []

    def function(items: list[int]) -> Any:
        calls.append(items)
        return answer

    outcomes = run_function(function, [1, 2, 3], {})
    assert len(calls) == 1
    for outcome in outcomes:
        assert isinstance(outcome.exception, WrongLength)
        assert f"function returned {found} items" in str(outcome.exception)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((1, 2), [1, 2]),
        ((n for n in (1, 2)), [1, 2]),
        ({1: "a", 2: "b"}.values(), ["a", "b"]),
        (np.array([1.5, 2.5]), [1.5, 2.5]),
        (np.array([[1, 2], [3, 4]], dtype=np.int8), [[1, 2], [3, 4]]),
        ([np.float32(0.5), np.arange(2)], [0.5, [0, 1]]),
        ([None, {}], [None, {}]),
    ],
)
def test_any_ordered_collection_is_accepted_and_rows_become_lists(
    answer: Any, expected: Any
) -> None:
    outcomes = run_function(lambda _: answer, [1, 2], {})
    assert outcomes == expected
    assert [type(each) for each in outcomes] == [type(each) for each in expected]


def test_function_gets_its_own_list_and_the_keywords_once() -> None:
    items = (1, 2)

    def function(part: list[int], *, tag: str) -> list[str]:
        part.reverse()
        return [f"{tag}{each}" for each in part]

    assert run_function(function, items, {"tag": "x"}) == ["x2", "x1"]


class Cancelled(BaseException):
    """Like the panics of Rust libraries, which are no `Exception`."""


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (SystemExit(3), RuntimeError, "called sys.exit(3)"),
        (MemoryError(), OutOfMemory, "no memory for this item, even alone"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA\nlong"), OutOfMemory, "(CUDA)"),
        (asyncio.CancelledError("gone"), RuntimeError, "raised CancelledError: gone"),
        (Cancelled("thread panicked"), RuntimeError, "raised Cancelled: thread panicked"),
        (LookupError("x"), LookupError, "x"),
        (ExceptionGroup("two", [ValueError("a")]), ExceptionGroup, "two"),
    ],
)
def test_any_exception_fails_only_its_item(
    error: BaseException, kind: type[Exception], words: str
) -> None:
    def function(items: list[int]) -> list[int]:
        if 1 in items:
            raise error
        return items

    good, bad = run_function(function, [0, 1], {})
    assert good == 0
    assert isinstance(bad.exception, kind)
    assert words in str(bad.exception)


def test_keyboard_interrupt_is_raised_and_not_an_outcome() -> None:
    def function(items: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_function(function, [1, 2], {})


def test_a_failure_has_its_traceback_as_text_and_holds_no_frames() -> None:
    (outcome,) = run_function(refuse({1}, []), [1], {})
    assert "in function" in outcome.traceback
    assert "LookupError: item 1" in outcome.traceback
    assert outcome.exception.__traceback__ is None


@pytest.mark.parametrize("signal", [Ignore("no"), Reject("no", requeue=True)])
def test_ignore_and_reject_may_be_raised_or_returned(signal: Exception) -> None:
    def raising(items: list[int]) -> list[int]:
        if 1 in items:
            raise signal
        return items

    def returning(items: list[int]) -> list[Any]:
        return [signal if item == 1 else item for item in items]

    for function in (raising, returning):
        assert run_function(function, [0, 1, 2], {}) == [0, signal, 2]


def test_an_exception_that_is_returned_has_failed() -> None:
    error = LookupError("x")
    one, two = run_function(lambda _: [error, RetryAfter(1)], [1, 2], {})
    assert isinstance(one, Failed)
    assert one.exception is error
    assert two == RetryAfter(1)


@pytest.mark.parametrize("error", [MemoryError("x"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("wrap", [Failed, lambda error: error])
def test_exception_that_would_end_celery_is_stored_as_another_one(
    error: BaseException, wrap: Callable[[BaseException], Any]
) -> None:
    """Celery's request re-raises these, and the message would never be acknowledged."""
    (outcome,) = run_function(lambda _: [wrap(error)], [1], {})
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, OutOfMemory | RuntimeError)


# Coroutines


async def shout(texts: list[str]) -> list[str]:
    await asyncio.sleep(0)
    return [text.upper() for text in texts]


def test_a_coroutine_runs_where_no_loop_does() -> None:
    assert run_function(shout, ["a"], {}) == ["A"]


def test_coroutine_runs_on_another_thread_while_a_loop_runs() -> None:
    async def caller() -> list[Any]:
        return run_function(shout, ["a", "b"], {})

    assert asyncio.run(caller()) == ["A", "B"]


def test_a_coroutine_runs_on_the_loop_it_is_given() -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()

        async def function(items: list[int]) -> list[bool]:
            return [asyncio.get_running_loop() is loop]

        assert run_function(function, [1], {}, resolve=runner.run) == [True]


def doubling(items: list[int]) -> Any:
    for index, item in enumerate(items):
        yield Partial(index, item)
        if item == 3:
            raise LookupError(item)
        yield 2 * item


async def doubling_async(items: list[int]) -> Any:
    for each in doubling(items):
        yield each


def doubling_returned(items: list[int]) -> Any:
    mixed = list(doubling(items))
    yield from (each for each in mixed if isinstance(each, Partial))
    return [each for each in mixed if not isinstance(each, Partial)]


def test_the_index_of_a_piece_may_be_a_number_of_numpy() -> None:
    pieces: list[Any] = []

    def function(items: list[int]) -> Any:
        for index in np.arange(len(items)):
            yield Partial(index, "a piece")
            yield "a result"

    outcomes = run_function(function, [1, 2], {}, receive=lambda _: pieces.append)
    assert (outcomes, [each.index for each in pieces]) == (["a result"] * 2, [0, 1])


def test_generators_of_all_kinds_yield_outcomes_and_pieces_of_each_call() -> None:
    for each in (doubling, doubling_async, doubling_returned):
        calls: list[tuple[Sequence[int], list[Any]]] = []

        def receive(part: Sequence[int], calls: Any = calls) -> Any:
            calls.append((part, []))
            return lambda partial: calls[-1][1].append(partial.piece)

        one, two, failed = run_function(each, [1, 2, 3], {}, receive=receive)
        assert (one, two, type(failed.exception)) == (2, 4, LookupError)
        # Halves, until the culprit is alone.
        parts = [range(3), range(1), range(1, 3), range(1, 2), range(2, 3)]
        assert [part for part, _ in calls] == parts
        assert [calls[at][1] for at in (1, 3)] == [[1], [2]]


# Models


class Words(Model):
    """Counts the letters of words, and notes its forward passes."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []

    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> list[Any]:
        answers: Mapping[Any, Any] = {
            "": Failed("empty"),
            "later": RetryAfter(1),
            "ignored": Ignore("no"),
            "wrong": ValueError("returned"),
        }
        for item in items:
            if item == "raise":
                raise LookupError("in preprocess")
            if item == "reject":
                raise Reject("in preprocess")
        return [answers.get(item, item) for item in items]

    def tokens(self, prepared: str) -> Any:
        if prepared == "untold":
            raise ArithmeticError("in tokens")
        return np.int64(len(prepared))

    def forward(self, batch: Sequence[str], *_: Any, **keywords: Any) -> Any:
        self.passes.append(list(batch))
        if "explode" in batch:
            raise ArithmeticError("in forward")
        return [len(word) for word in batch]


def one_by_one(lengths: Sequence[int]) -> list[list[int]]:
    """Longest first, in twos: anything but the order of arrival."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return [order[at : at + 2] for at in range(0, len(order), 2)]


def run(model: Model, items: Sequence[Any], **keywords: Any) -> tuple[list[Any], int, int]:
    return compute(model, prepare(model, items, keywords), keywords, one_by_one)


@given(words=st.lists(st.text("ab", min_size=1, max_size=30), max_size=40))
def test_results_come_in_the_order_of_the_items_and_tokens_are_counted(words: list[str]) -> None:
    model = Words()
    outcomes, tokens, computed = run(model, words)
    assert outcomes == [len(word) for word in words]
    assert tokens == sum(outcomes)
    assert computed == sum(max(map(len, part)) * len(part) for part in model.passes)
    assert type(tokens) is type(computed) is int


@given(words=st.lists(st.text(min_size=1, max_size=9), max_size=12))
def test_a_model_that_does_not_pad_computes_what_is_needed(words: list[str]) -> None:
    model = Words()
    model.pads = False
    _, tokens, computed = run(model, words)
    assert computed == tokens


def test_item_that_preprocess_fails_keeps_its_position_and_never_reaches_the_model() -> None:
    items = ["one", "", "later", "ignored", "wrong", "raise", "reject", "untold", "three"]
    model = Words()
    outcomes, tokens, _ = run(model, items)
    assert (outcomes[0], outcomes[-1]) == (3, 5)
    assert tokens == 8
    assert model.passes == [["three", "one"]]
    assert [str(outcomes[at].exception) for at in (1, 4, 5, 7)] == [
        "empty",
        "returned",
        "in preprocess",
        "in tokens",
    ]
    assert outcomes[2] == RetryAfter(1)
    assert isinstance(outcomes[3], Ignore)
    assert isinstance(outcomes[6], Reject)


def test_prepared_items_reach_the_model_as_they_are() -> None:
    """Arrays become lists in results, not on the way to the model."""
    seen: list[Any] = []

    class Arrays(Model):
        def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Any:
            return [np.arange(item) for item in items]

        def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
            seen.extend(batch)
            return [each.sum() for each in batch]

    assert run(Arrays(), [3, 4])[0] == [3, 6]
    assert all(isinstance(each, np.ndarray) for each in seen)


def test_exception_in_a_forward_pass_fails_only_its_item() -> None:
    outcomes, _, _ = run(Words(), ["aaa", "explode", "bbbbbbbbb", "c"])
    assert [outcomes[at] for at in (0, 2, 3)] == [3, 9, 1]
    assert str(outcomes[1].exception) == "in forward"


def test_batch_of_failed_items_runs_no_forward_pass() -> None:
    model = Words()
    outcomes, tokens, computed = run(model, ["", ""])
    assert model.passes == []
    assert (tokens, computed) == (0, 0)
    assert all(isinstance(each, Failed) for each in outcomes)


def test_keywords_reach_all_stages() -> None:
    seen: list[Any] = []

    class Curious(Model):
        def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Any:
            seen.append(keywords)
            return items

        def forward(self, batch: Sequence[Any], *_: Any, **keywords: Any) -> Any:
            seen.append(keywords)
            return batch

        def postprocess(self, outputs: Any, *_: Any, top_k: int = 0, **keywords: Any) -> Any:
            seen.append({"top_k": top_k})
            return outputs

    run(Curious(), [1], top_k=3)
    assert seen == [{"top_k": 3}] * 3


def test_a_model_without_forward_says_so() -> None:
    ((outcome,), _, _) = run(Model(), [1])
    assert isinstance(outcome.exception, NotImplementedError)
    assert "Model has no forward method" in str(outcome.exception)


class Small(Words):
    """Has memory for so many characters at a time, padding counted."""

    def __init__(self, fits: int, error: Exception | None = None) -> None:
        super().__init__()
        self.fits = fits
        self.error = error or MemoryError()

    def forward(self, batch: Sequence[str], *_: Any, **keywords: Any) -> Any:
        self.passes.append(list(batch))
        if max(map(len, batch)) * len(batch) > self.fits:
            raise self.error
        return [len(word) for word in batch]


class Learner:
    """Halves its budget at each failure, and notes what it was told."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.told: list[tuple[str, int]] = []

    def passed(self, tokens: int) -> None:
        self.told.append(("passed", tokens))

    def failed(self, tokens: int) -> None:
        self.told.append(("failed", tokens))
        self.budget = min(self.budget, tokens // 2)

    def cut(self, lengths: Sequence[int]) -> list[list[int]]:
        size = max(1, self.budget // max(lengths))
        return [list(range(len(lengths)))[at : at + size] for at in range(0, len(lengths), size)]


def test_out_of_memory_fails_only_items_too_large_alone_and_plans_the_rest_anew() -> None:
    model, learner = Small(fits=40), Learner(budget=100)
    words = ["x" * 10] * 30
    outcomes, tokens, _ = compute(model, words, {}, learner.cut, memory=learner)
    assert outcomes == [10] * 30
    assert tokens == 300
    # Ten at once did not fit, nor did five; from then on it was known.
    assert [told for told in learner.told if told[0] == "failed"] == [
        ("failed", 100),
        ("failed", 50),
        ("failed", 50),
    ]
    assert max(len(batch) for batch in model.passes[-5:]) <= 4


def test_out_of_memory_without_a_learner_splits_in_halves() -> None:
    model = Small(fits=40)
    whole = [list(range(8))]
    outcomes, _, _ = compute(model, ["x" * 10] * 8, {}, lambda _: whole)
    assert outcomes == [10] * 8
    assert [len(batch) for batch in model.passes] == [8, 4, 4]


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class AcceleratorError(RuntimeError):
    """Named like torch's, which it raises for any error of CUDA."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("Failed to allocate memory for requested buffer"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_memory_of_every_kind_that_ran_out_is_known(error: Exception) -> None:
    learner = Learner(budget=100)
    outcomes, _, _ = compute(Small(40, error), ["x" * 10] * 9, {}, learner.cut, memory=learner)
    assert outcomes == [10] * 9
    assert learner.budget < 100
    (alone,), _, _ = compute(Small(40, error), ["x" * 41], {}, lambda _: [[0]])
    assert isinstance(alone.exception, OutOfMemory)


@pytest.mark.parametrize(
    "error",
    [AcceleratorError("CUDA error: device-side assert triggered"), ValueError("out of memory")],
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error: Exception) -> None:
    learner = Learner(budget=100)
    outcomes, _, _ = compute(Small(40, error), ["x" * 41], {}, learner.cut, memory=learner)
    assert (outcomes[0].exception, learner.budget) == (error, 100)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_exception_that_refuses_attributes_passes_what_is_around_the_function() -> None:
    @contextmanager
    def around(_: Any) -> Iterator[None]:
        yield

    def function(items: list[int]) -> list[int]:
        raise Frozen(items[0])

    outcomes = run_function(function, [1, 2], {}, around=around)
    assert [outcome.exception for outcome in outcomes] == [Frozen(1), Frozen(2)]


def test_an_outcome_is_read_back_as_its_caller_reads_it() -> None:
    failed = Failed("no")
    assert read_back(failed) is failed
    assert read_back({"a": (1, 2)}) == {"a": [1, 2]}
    assert isinstance(read_back({object()}), Failed)


# Isolation by itself


def raising(error: BaseException) -> Callable[[Sequence[int]], Any]:
    def call(items: Sequence[int]) -> Any:
        raise error

    return call


def isolated(call: Callable[[Sequence[int]], Any], *items: int) -> list[Any]:
    return isolate(call, items, name="double")


def failure(outcome: Any) -> Exception:
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Exception)
    return outcome.error


def test_only_what_has_the_method_becomes_a_list() -> None:
    class Row:
        def tolist(self) -> list[float]:
            return [1.0]

    class Text:
        tolist = "no method"

    text = Text()
    assert isolated(lambda _: [Row(), text], 1, 2) == [[1.0], text]


@pytest.mark.parametrize(("text", "said"), [("first\nsecond", "(first)"), ("", "(MemoryError)")])
def test_item_without_memory_says_what_to_do(text: str, said: str) -> None:
    (outcome,) = isolated(raising(MemoryError(text)), 1)
    assert said in str(failure(outcome))
    assert "use a shorter item" in str(failure(outcome))


class Untold(RuntimeError):
    """Python cannot print it: `traceback` asks it for its notes."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __str__(self) -> str:
        raise KeyError("text")


def test_exception_that_cannot_be_told_fails_its_item_alone() -> None:
    def call(items: Sequence[int]) -> list[int]:
        return [2 * item for item in items] if 13 not in items else raising(Untold())(items)

    one, other = isolated(call, 13, 1)
    assert other == 2
    assert type(failure(one)) is Untold
    assert one.traceback.endswith("Untold: its text cannot be made: KeyError\n")


def test_memory_has_run_out_if_an_error_came_from_that() -> None:
    outer, inner = ValueError("a layer failed"), LookupError("within")
    outer.__cause__ = inner
    assert not has_run_out(outer)
    inner.__cause__ = MemoryError()
    assert has_run_out(outer)
    assert has_run_out(OutOfMemory("no memory for this item"))
    assert not has_run_out(None)
