"""Of equal items one is computed; what is no value is shared with nobody."""

from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batchery import Failed, Ignore, RetryAfter
from batchery_worker.plain_values import Encoded
from batchery_worker.result_cache import DedupedBatch

#: Lower case is computed; `x...` fails as often as its number says; `-` has no name.
ITEMS = st.lists(st.sampled_from(["a", "b", "c", "x1", "x2", "x9", "-"]), max_size=12)


def key(item: str) -> bytes | None:
    return None if item == "-" else item.encode()


class Function:
    """Notes what it computes."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.counts: Counter[str] = Counter()

    def __call__(self, items: list[str]) -> Sequence[Any]:
        self.calls.append(items)
        return [self._one(item) for item in items]

    def _one(self, item: str) -> Any:
        self.counts[item] += 1
        if item.startswith("x") and self.counts[item] <= int(item[1:]):
            return Failed(f"{item}, time {self.counts[item]}")
        return item.upper()


def fold(items: Sequence[str], found: dict[bytes, bytes] | None = None) -> DedupedBatch:
    return DedupedBatch([key(item) for item in items], found or {})


def run(
    deduped: DedupedBatch, items: Sequence[str], function: Function, before: Any = None
) -> list[Any]:
    return deduped.run([items[place] for place in deduped.positions], before or {}, function)


def value(outcome: Any) -> Any:
    return outcome.value if isinstance(outcome, Encoded) else outcome


def test_only_values_are_cached() -> None:
    settled = [Failed("no"), RetryAfter(1), Ignore()]
    deduped = DedupedBatch([b"a", b"b", b"c"], {})
    assert deduped.run(["a", "b", "c"], {}, lambda _: settled) == settled
    deduped.encode()
    assert not deduped.computed_values
    assert not deduped.fresh()


def test_a_value_is_encoded_once_for_all_of_its_jobs() -> None:
    items, function = ["a", "a"], Function()
    deduped = fold(items)
    run(deduped, items, function)
    first, second = deduped.encode()
    assert first is second
    assert first.json == b'"A"'


def test_value_that_cannot_be_encoded_stays_as_it_is() -> None:
    outcomes = [object(), {"__type__": "date", "__value__": "today"}, date(2026, 1, 2)]
    deduped = DedupedBatch([b"a", b"b", b"c"], {})
    deduped.run(["a", "b", "c"], {}, lambda _: outcomes)
    encoded = deduped.encode()
    assert encoded[:2] == outcomes[:2]
    assert encoded[2].value == date(2026, 1, 2)
    assert list(deduped.fresh()) == [b"c"]


def test_a_result_of_the_cache_is_decoded_as_celery_would() -> None:
    deduped = DedupedBatch([b"a"], {b"a": b'{"__type__": "date", "__value__": "2026-01-02"}'})
    (outcome,) = deduped.run([], {}, lambda _: [])
    assert outcome.value == date(2026, 1, 2)


@given(ITEMS, st.sets(st.sampled_from("abc")), st.sets(st.sampled_from("abc")))
def test_each_item_gets_its_own_outcome_or_that_of_an_equal_item(
    items: list[str], stored: set[str], learned: set[str]
) -> None:
    function = Function()
    deduped = fold(items, {each.encode(): f'"{each.upper()}"'.encode() for each in stored})
    before = {each.encode(): each.upper() for each in learned}
    outcomes = run(deduped, items, function, before)
    assert len(outcomes) == len(items)
    for item, outcome in zip(items, outcomes, strict=True):
        if isinstance(outcome, Failed):
            assert item.startswith("x")
        else:
            assert value(outcome) == item.upper()
    # Each that was not shared was computed itself, once.
    shared = stored | learned
    for item, count in Counter(items).items():
        is_alone = item == "-" or item.startswith("x")
        assert function.counts[item] == (count if is_alone else item not in shared)
    counts = deduped.counts()
    assert counts["items"] == len(items)
    assert counts["hits"] == sum(each in stored for each in items)
    assert counts["hits"] + counts["deduplicated"] + counts["computed"] == len(items)
    assert counts["computed"] == sum(function.counts.values())
    assert len(function.calls) <= 2
    assert all(function.calls)
    # And so they stay when they are encoded.
    after = [value(each) for each in deduped.encode()]
    assert after == [value(each) for each in outcomes]
    # What is new goes into the cache.
    good = {each for each, got in zip(items, outcomes, strict=True) if not isinstance(got, Failed)}
    assert set(deduped.fresh()) == {each.encode() for each in good - shared - {"-"}}
