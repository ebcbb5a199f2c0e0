"""`batched`: calls from threads and event loops, each with its own result."""

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from batchery import (
    BatchArgumentError,
    Failed,
    ItemFailed,
    Partial,
    RetryAfter,
    Settings,
    batched,
)
from batchery_worker.inprocess.options import USUAL_CLASSES
from support.gate import WAIT_S, Gate, batcher_threads
from support.harness import wait_for


@batched(max_batch_size=8)
def shout(texts: list[str], mark: str = "") -> list[Any]:
    """Makes texts loud."""
    return [Failed("quiet") if text == "quiet" else text.upper() + mark for text in texts]


def test_one_item_has_one_result_and_a_list_has_a_list() -> None:
    assert shout("a") == "A"
    assert shout(["a", "b"]) == ["A", "B"]
    assert shout([]) == []
    assert shout(list(map(str, range(100)))) == [str(number) for number in range(100)]
    with pytest.raises(ItemFailed, match=r"^quiet$"):
        shout("quiet")
    assert (shout.__name__, shout.__doc__) == ("shout", "Makes texts loud.")
    assert shout.function(["a"]) == ["A"]


def test_coroutines_of_any_event_loop_call_it() -> None:
    async def main() -> Any:
        return await asyncio.gather(shout.acall("a"), shout.acall(["b", "c"]), shout.acall([]))

    for _ in range(2):
        assert asyncio.run(main()) == ["A", ["B", "C"], []]


def test_usual_classes_are_those_of_a_worker() -> None:
    # `batched` must not load the settings, which need pydantic.
    assert dict(USUAL_CLASSES) == {
        name: each.share for name, each in Settings.model_fields["classes"].default.items()
    }


def test_an_item_that_is_a_list_is_submitted() -> None:
    total = batched(lambda items: [sum(item) for item in items])
    assert total.submit([1, 2]).result(WAIT_S) == 3
    assert total([[1, 2], [3]]) == [3, 3]
    assert total.submit_many(iter([[1, 2], [3]])).result(WAIT_S) == [3, 3]
    assert total.submit_many([]).result(0) == []


def test_callers_of_a_sorted_batch_are_answered_when_their_part_has_run() -> None:
    long, goes_on = threading.Event(), threading.Event()

    def measure(texts: list[str]) -> list[int]:
        if len(texts[0]) > 100:
            long.set()
            assert goes_on.wait(WAIT_S)
        return [len(text) for text in texts]

    limits = {"max_batch_tokens": 1000, "max_batch_size": 2, "max_wait_ms": 3_600_000}
    with batched(measure, length=len, **limits) as function:
        texts = ["a" * 900, "b" * 10]
        last, first = (function.submit(text) for text in texts)
        try:
            assert long.wait(WAIT_S)
            # The shortest part runs first.
            assert first.result(WAIT_S) == 10
            assert not last.done()
        finally:
            goes_on.set()
        assert last.result(WAIT_S) == 900
        assert function.stats.batches == 1
        assert function.stats.items == 2


def test_what_waits_while_a_batch_runs_is_the_next_batch(gate: Gate) -> None:
    function = batched(gate, max_batch_size=4)
    held = gate.hold(function)
    futures = [function.submit(number) for number in range(6)]
    wait_for(lambda: function.stats.waiting == 6, "all wait")
    gate.opened.set()
    assert [each.result(WAIT_S) for each in futures] == [f"{number}!" for number in range(6)]
    assert held.result(WAIT_S) == "held!"
    assert gate.batches == [["held"], [0, 1, 2, 3], [4, 5]]
    stats = function.stats
    assert (stats.items, stats.batches, stats.calls_of_function, stats.waiting) == (7, 3, 3, 0)
    assert stats.mean_batch_size == pytest.approx(7 / 3)
    assert stats.mean_run_ms > 0


def test_small_calls_do_not_wait_behind_large_ones(gate: Gate) -> None:
    function = batched(gate, max_batch_size=4, small_batch_threshold=1)
    gate.hold(function)
    large, small = function.submit_many(range(12)), function.submit("small")
    gate.opened.set()
    assert (small.result(WAIT_S), len(large.result(WAIT_S))) == ("small!", 12)
    assert "small" in [*gate.batches[1], *gate.batches[2]]


def test_calls_with_other_keywords_are_other_batches(gate: Gate) -> None:
    seen: list[tuple[list[str], dict[str, Any]]] = []

    def note(texts: list[str], **keywords: Any) -> list[str]:
        if texts == ["held"]:
            return gate(texts)
        seen.append((texts, keywords))
        return texts

    function = batched(note)
    gate.hold(function)
    sent: list[tuple[str, dict[str, Any]]] = [
        ("a", {"n": 1}),
        ("b", {"n": True}),
        ("c", {"n": 1}),
        ("d", {"n": 1.0}),
        ("e", {"n": (1, 2)}),
        ("f", {"n": [1, 2]}),
    ]
    futures = [function.submit(text, **keywords) for text, keywords in sent]
    gate.opened.set()
    assert [each.result(WAIT_S) for each in futures] == list("abcdef")
    assert [texts for texts, _ in seen] == [["a", "c"], ["b"], ["d"], ["e"], ["f"]]
    # As they were given, though JSON spells some alike.
    values = [1, True, 1.0, (1, 2), [1, 2]]
    assert [repr(keywords["n"]) for _, keywords in seen] == list(map(repr, values))


def test_one_bad_item_fails_alone() -> None:
    calls: list[list[int]] = []

    def invert(numbers: list[int]) -> list[float]:
        calls.append(numbers)
        return [1 / number for number in numbers]

    function = batched(invert, max_batch_size=8)
    found = function.options(return_exceptions=True)([1, 2, 0, 4])
    assert [found[place] for place in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert isinstance(found[2], ZeroDivisionError)
    assert calls == [[1, 2, 0, 4], [1, 2], [0, 4], [0], [4]]
    with pytest.raises(ZeroDivisionError) as caught:
        function([1, 0])
    # The trace ends where it was raised.
    assert caught.traceback[-1].name == "<listcomp>" or "invert" in str(caught.traceback[-1])
    # Callers are answered before they are counted.
    wait_for(lambda: function.stats.failed == 2, "both are counted")
    assert function.stats.items == 6


class Odd(BaseException):
    pass


@pytest.mark.parametrize("raised", [SystemExit(3), Odd("odd"), KeyboardInterrupt()])
def test_what_would_end_a_thread_is_an_error_of_the_item(raised: BaseException) -> None:
    def end(items: list[str]) -> list[str]:
        if "end" in items:
            raise raised
        return items

    function = batched(end)
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\)|raised Odd|KeyboardInterrupt"):
        function("end")
    assert function("go on") == "go on"


def test_outcomes_that_take_a_worker_are_refused() -> None:
    function = batched(lambda items: [RetryAfter(1.0) for _ in items])
    with pytest.raises(ItemFailed, match="answered RetryAfter, which takes a Celery worker"):
        function("a")


def test_results_stay_what_the_function_returned() -> None:
    value = object()
    assert batched(lambda items: [value for _ in items])("a") is value
    # A generator runs while its answers are taken.
    assert batched(lambda items: (item * 2 for item in items))(["a", "b"]) == ["aa", "bb"]


def test_a_coroutine_function_runs_on_one_event_loop_of_its_own() -> None:
    loops: set[Any] = set()

    @batched
    async def double(numbers: list[int]) -> list[int]:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [2 * number for number in numbers]

    async def main() -> Any:
        return await double.acall(2)

    assert (double(1), asyncio.run(main()), double([3])) == (2, 4, [6])
    assert len(loops) == 1
    double.close()
    assert loops.pop().is_closed()


class Embedder:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @batched(max_batch_size=4)
    def embed(self, numbers: list[int], plus: int = 0) -> list[int]:
        return [self.factor * number + plus for number in numbers]

    @batched
    def other(self, numbers: list[int]) -> list[int]:
        return numbers


class Child(Embedder):
    @batched
    def embed(self, numbers: list[int], plus: int = 0) -> list[int]:
        return [-number for number in super().embed(numbers, plus=plus)]


def test_each_instance_has_a_batcher_of_its_own() -> None:
    two, three = Embedder(2), Embedder(3)
    assert (two.embed(1), three.embed(1), two.embed([1, 2], plus=1)) == (2, 3, [3, 5])
    assert (two.embed.stats.items, three.embed.stats.items, two.other.stats.items) == (3, 1, 0)
    assert Child(2).embed([1, 2]) == [-2, -4]
    assert Embedder.embed.function(two, [5]) == [10]


def test_a_copy_of_an_instance_has_a_batcher_of_its_own() -> None:
    two = Embedder(2)
    assert two.embed(1) == 2
    for made in (copy.copy(two), copy.deepcopy(two), pickle.loads(pickle.dumps(two))):
        made.factor = 5
        assert (made.embed(1), two.embed(1)) == (5, 2)


def test_a_batcher_goes_with_its_instance() -> None:
    before = set(batcher_threads())
    two = Embedder(2)
    assert two.embed(1) == 2
    (thread,) = set(batcher_threads()) - before
    bound = two.embed
    gone = weakref.ref(two)
    gc.disable()
    try:
        del two
        assert bound(2) == 4
        del bound
        # No cycle keeps the model's memory until somebody looks for cycles.
        assert gone() is None
    finally:
        gc.enable()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_calls_are_answered_although_nobody_holds_the_instance() -> None:
    assert Embedder(2).embed.submit(3).result(WAIT_S) == 6
    assert batched(lambda items: items).options(timeout_s=WAIT_S)("x") == "x"


class Slim:
    __slots__ = ("__weakref__",)

    @batched
    def embed(self, items: list[Any]) -> list[Any]:
        return items


class Slimmer:
    __slots__ = ()
    embed = Slim.embed


def test_a_batcher_ends_with_its_instance_so_that_must_have_weak_references() -> None:
    assert Slim().embed("a") == "a"
    with pytest.raises(BatchArgumentError, match='Slimmer have no weak references; add "__weak'):
        Slimmer().embed("a")


def test_a_function_that_calls_its_own_batcher_is_told() -> None:
    @batched
    def deep(items: list[int]) -> list[int]:
        return [deep(item - 1) if item else item for item in items]

    assert deep(0) == 0
    with pytest.raises(BatchArgumentError, match="would wait for itself"):
        deep(1)


def test_a_coroutine_that_waits_for_its_own_batcher_is_told() -> None:
    @batched
    async def deep(items: list[int]) -> list[int]:
        return [
            await asyncio.wrap_future(deep.submit(item - 1)) if item else item for item in items
        ]

    assert deep(0) == 0
    with pytest.raises(BatchArgumentError, match="would wait for itself"):
        deep(1)


def test_a_generator_may_yield_partial_results_which_nobody_reads() -> None:
    @batched
    def spell(words: list[str]) -> Iterator[Any]:
        for index, word in enumerate(words):
            yield from (Partial(index, letter) for letter in word)
            yield word.upper()

    @batched
    def answer_at_the_end(words: list[str]) -> Generator[Any, None, list[str]]:
        yield Partial(0, "soon")
        return [word.upper() for word in words]

    assert spell(["one", "two"]) == answer_at_the_end(["one", "two"]) == ["ONE", "TWO"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0: give a whole number above 0"),
        ({"max_batch_size": None}, "max_batch_size=None"),
        ({"max_batch_size": 2.5}, r"max_batch_size=2\.5"),
        ({"max_wait_ms": -1}, "max_wait_ms=-1"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms=nan"),
        ({"target_latency_ms": 0}, "target_latency_ms=0"),
        ({"max_batch_tokens": 5}, "max_batch_tokens needs length"),
        ({"small_batch_threshold": "2"}, "small_batch_threshold='2'"),
        ({"classes": {}}, "give the share of each"),
        ({"classes": ["a"]}, "give the share of each"),
        ({"length": 3}, "length=3: give a function"),
        ({"classes": {"a": -1}}, r"classes\['a'\]=-1"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"batch_size": 2}, "there is no option batch_size; there are max_batch_size, "),
    ],
)
def test_a_wrong_option_is_found_where_it_is_written(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BatchArgumentError, match=text):
        batched(**options)


@pytest.mark.parametrize("what", [3, "embed", Embedder, staticmethod(len), classmethod(print)])
def test_only_functions_are_decorated(what: Any) -> None:
    with pytest.raises(BatchArgumentError, match=r"decorate a function.* @staticmethod above"):
        batched(what)


class Priced:
    @classmethod
    @batched
    def price(cls, names: list[str]) -> list[int]:
        return [len(name) for name in names]


def test_class_methods_are_refused_with_what_to_do() -> None:
    with pytest.raises(BatchArgumentError, match="use a @staticmethod above @batched"):
        Priced.price("tea")


@pytest.mark.parametrize("counted", [None, "3", {"input_ids": [1]}, float("nan")])
def test_a_length_that_is_no_number_is_told_to_its_caller(counted: Any) -> None:
    with batched(
        lambda texts: texts, length=lambda text: counted if text == "bad" else len(text)
    ) as function:
        with pytest.raises((TypeError, ValueError)):
            function(["good", "bad"])
        assert function(["good", "again"]) == ["good", "again"]


def test_a_wrong_call_is_told() -> None:
    with pytest.raises(BatchArgumentError, match="takes exactly one positional argument"):
        shout("a", "b")
    with pytest.raises(BatchArgumentError, match="must be plain data"):
        shout("a", mark=object())
    for options, text in [
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"priority_class": "live"}, "priority_class='live': there are high, normal, low"),
        ({"timeout": 3}, "shout: there is no option timeout; there are timeout_s"),
    ]:
        with pytest.raises(BatchArgumentError, match=text):
            shout.options(**options)  # type: ignore[arg-type]
