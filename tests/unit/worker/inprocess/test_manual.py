"""The policies of a batcher, on a clock of the test's own."""

import asyncio
from typing import Any

import pytest

from batchery import BatchArgumentError, Batcher, BatcherClosed, DeadlineExceeded, batched
from batchery.testing import ManualBatcher


def echo(items: list[Any]) -> list[Any]:
    return items


def test_a_lone_call_waits_for_nothing() -> None:
    batcher = ManualBatcher(echo)
    assert (batcher("a"), batcher(["b", "c"])) == ("a", ["b", "c"])
    assert asyncio.run(batcher.acall("d")) == "d"
    assert (batcher.now_s, batcher.batches) == (0.0, [["a"], ["b", "c"], ["d"]])


def test_a_batch_waits_for_others_until_it_is_full_or_its_time_is_over() -> None:
    batcher = ManualBatcher(echo, max_wait_ms=50, max_batch_size=3)
    early = batcher.submit("a")
    batcher.advance(0.03)
    late = batcher.submit("b")
    batcher.advance(0.0199)
    assert not early.done()
    batcher.advance(0.0002)
    assert (early.result(0), late.result(0)) == ("a", "b")
    full = [batcher.submit(number) for number in range(3)]
    batcher.advance(0)
    assert [each.result(0) for each in full] == [0, 1, 2]
    assert batcher.batches == [["a", "b"], [0, 1, 2]]


def test_options_of_a_decorated_function_count_and_can_be_replaced() -> None:
    function = batched(max_wait_ms=50, max_batch_size=2)(echo)
    assert ManualBatcher(function).options().stats.batches == 0
    batcher = ManualBatcher(function, max_batch_size=3)
    for number in range(3):
        batcher.submit(number)
    batcher.advance(0)
    assert batcher.batches == [[0, 1, 2]]


class Shouter(Batcher):
    mark = "?"

    def load(self) -> None:
        self.mark = "!"

    def infer(self, texts: list[str]) -> list[str]:
        return [text + self.mark for text in texts]


class Speaker:
    mark = "."

    @batched(max_batch_size=2, max_wait_ms=50)
    def say(self, texts: list[str]) -> list[str]:
        return [text + self.mark for text in texts]


@pytest.mark.parametrize(
    ("made", "mark"),
    [(Shouter(max_batch_size=2, max_wait_ms=50), "!"), (Speaker().say, ".")],
    ids=["batcher", "method"],
)
def test_options_of_methods_and_batchers_count(made: Any, mark: str) -> None:
    batcher = ManualBatcher(made)
    futures = [batcher.submit(letter) for letter in "abcde"]
    batcher.advance(0.04)
    assert batcher.batches == [["a", "b"], ["c", "d"]]
    batcher.close()
    assert [each.result(0) for each in futures] == [letter + mark for letter in "abcde"]
    with pytest.raises(BatcherClosed):
        batcher.submit("f")


def test_classes_share_the_time_by_their_shares() -> None:
    batcher = ManualBatcher(
        echo, classes={"live": 3, "bulk": 1}, max_batch_size=1, takes_s=lambda items: 0.01 * items
    )
    for _ in range(40):
        batcher.options(priority_class="live").submit("live")
        batcher.options(priority_class="bulk").submit("bulk")
    batcher.advance(0.2)
    first = [batch[0] for batch in batcher.batches[:20]]
    assert 14 <= first.count("live") <= 16


def test_tenants_have_equal_parts() -> None:
    batcher = ManualBatcher(echo, max_batch_size=1, takes_s=lambda items: 0.01 * items)
    for _ in range(100):
        batcher.options(tenant="many").submit("many")
    batcher.options(tenant="one").submit("one")
    for _ in range(3):
        batcher.run_next()
    assert ["one"] in batcher.batches


def test_small_calls_do_not_wait_behind_large_ones() -> None:
    batcher = ManualBatcher(
        echo, max_batch_size=2, small_batch_threshold=2, takes_s=lambda items: 0.01 * items
    )
    large = batcher.submit_many(["large"] * 20)
    small = batcher.submit("small")
    for _ in range(2):
        batcher.run_next()
    assert small.done()
    assert not large.done()
    batcher.advance(1)
    assert large.result(0) == ["large"] * 20


def test_the_earliest_deadline_goes_first() -> None:
    batcher = ManualBatcher(echo, max_batch_size=1)
    for name, deadline_s in [("none", None), ("late", 5.0), ("early", 1.0)]:
        batcher.options(deadline_s=deadline_s).submit(name)
    batcher.advance(0)
    assert batcher.batches == [["early"], ["late"], ["none"]]


def test_calls_that_cannot_make_their_deadline_are_given_up() -> None:
    batcher = ManualBatcher(echo, max_batch_size=1, shed_late=True, takes_s=lambda _: 1.0)
    kept = batcher.submit("kept")
    late = batcher.options(deadline_s=0.5).submit("late")
    other = batcher.options(deadline_s=0.4).submit("other")
    batcher.advance(5)
    assert kept.result(0) == "kept"
    assert other.result(0) == "other"
    with pytest.raises(DeadlineExceeded):
        late.result(0)
    assert batcher.stats.dropped == 1


def test_a_target_limits_batches() -> None:
    batcher = ManualBatcher(
        echo, max_batch_size=64, target_latency_ms=100, takes_s=lambda items: 0.005 * items
    )
    for _ in range(2_000):
        batcher.submit("x")
    batcher.advance(60)
    sizes = [len(batch) for batch in batcher.batches]
    # 100 ms are 20 items; a call may have to wait for the batch before its own.
    assert max(sizes[len(sizes) // 2 : -1]) <= 20
    assert sum(sizes) == 2_000


def test_items_are_sorted_by_length_and_cut_where_that_saves_padding() -> None:
    batcher = ManualBatcher(echo, length=len, max_batch_size=8)
    texts = ["a" * length for length in (1, 300, 2, 299, 3, 298, 2, 300)]
    assert batcher(texts) == texts
    assert [[len(text) for text in batch] for batch in batcher.batches] == [
        [3, 2, 2, 1],
        [300, 300, 299, 298],
    ]
    assert batcher.stats.calls_of_function == 2
    assert batcher.stats.padding_waste == pytest.approx(1 - 1205 / 1212)


def test_a_call_of_the_function_has_no_more_tokens_than_it_may() -> None:
    batcher = ManualBatcher(echo, length=len, max_batch_tokens=100)
    texts = ["a" * length for length in (40, 40, 40, 120, 40)]
    assert batcher(texts) == texts
    assert [[len(text) for text in batch] for batch in batcher.batches] == [
        [40, 40],
        [40, 40],
        [120],
    ]


def test_a_length_that_raises_is_told_to_its_caller_alone() -> None:
    batcher = ManualBatcher(echo, length=len)
    good = batcher.submit("good")
    with pytest.raises(TypeError, match=r"int.*has no len"):
        batcher.submit(3)
    batcher.advance(0)
    assert good.result(0) == "good"


def test_time_only_goes_on() -> None:
    batcher = ManualBatcher(echo)
    with pytest.raises(BatchArgumentError, match="time only goes on"):
        batcher.advance(-1)
    with pytest.raises(AssertionError, match="nothing waits"):
        batcher.run_next()


def test_calls_that_make_their_deadline_are_answered_when_it_is_closed() -> None:
    batcher = ManualBatcher(
        lambda numbers: numbers, takes_s=lambda _: 0.1, max_wait_ms=1000, shed_late=True
    )
    for number in range(40):
        assert batcher(number) == number
    future = batcher.options(deadline_s=0.5).submit(7)
    batcher.close()
    assert future.result(0) == 7


def test_calls_that_would_be_too_late_in_their_batch_are_told_at_once() -> None:
    batcher = ManualBatcher(
        lambda numbers: numbers, takes_s=lambda count: 0.05 + 0.05 * count, shed_late=True
    )
    for number in range(40):
        assert batcher(number) == number
    # Each of them would make it alone.
    futures = [batcher.options(deadline_s=0.2).submit(number) for number in range(5)]
    batcher.advance(0)
    for future in futures:
        with pytest.raises(DeadlineExceeded):
            future.result(0)
    with pytest.raises(DeadlineExceeded):
        batcher.options(deadline_s=0.2)([*range(5)])


def test_who_finds_no_space_has_the_batches_before_run() -> None:
    batcher = ManualBatcher(echo, max_waiting=1, max_wait_ms=50)
    futures = [batcher.submit(letter) for letter in "abc"]
    assert [each.done() for each in futures] == [True, True, False]
    assert asyncio.run(batcher.acall("d")) == "d"
    assert (batcher.batches, futures[2].result(0)) == ([["a"], ["b"], ["c"], ["d"]], "c")
