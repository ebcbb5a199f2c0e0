"""Forward passes that are started before their turn: same results, another order of events."""

from collections.abc import Sequence
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from batchery.execution.batch import Lookahead, compute
from batchery.model import Model
from batchery.outcomes import Failed


class Launched(Model):
    """Its passes return early; notes what happens when."""

    passes_ahead = 1

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fits = 100

    def tokens(self, prepared: str) -> int:
        return len(prepared)

    def forward(self, batch: Sequence[str], *_: Any, **keywords: Any) -> list[str]:
        self.log.append(f"forward {' '.join(batch)}")
        if len(batch) > self.fits:
            raise MemoryError
        return list(batch)

    def postprocess(self, outputs: Any, *_: Any, **keywords: Any) -> list[str]:
        self.log.append(f"results {' '.join(outputs)}")
        if "bad" in outputs:
            raise ArithmeticError("bad")
        return [each.upper() for each in outputs]


def pairs(lengths: Sequence[int]) -> list[list[int]]:
    return [list(range(len(lengths)))[at : at + 2] for at in range(0, len(lengths), 2)]


def test_next_pass_starts_before_the_results_of_the_last_one_are_awaited() -> None:
    model = Launched()
    outcomes, _, _ = compute(
        model, list("abcde"), {}, pairs, start_next_batch=lambda: model.log.append("-")
    )
    assert outcomes == list("ABCDE")
    assert model.log == [
        *("forward a b", "forward c d", "results a b", "forward e", "results c d"),
        *("-", "results e"),
    ]


def test_lookahead_starts_as_many_passes_as_the_model_allows() -> None:
    model = Launched()
    model.passes_ahead = 2
    outcomes, _, _ = compute(
        model, list("abcdefg"), {}, pairs, start_next_batch=lambda: model.log.append("-")
    )
    assert outcomes == list("ABCDEFG")
    assert model.log == [
        *("forward a b", "forward c d", "forward e f", "results a b"),
        *("forward g", "results c d", "-", "results e f", "-", "results g"),
    ]


def test_model_without_lookahead_runs_pass_by_pass() -> None:
    model = Launched()
    model.passes_ahead = 0
    assert compute(model, list("abc"), {}, pairs)[0] == list("ABC")
    assert model.log == ["forward a b", "results a b", "forward c", "results c"]


def test_bad_item_fails_alone_with_lookahead() -> None:
    model = Launched()
    outcomes, _, _ = compute(model, ["a", "bad", "c", "d"], {}, pairs)
    assert [isinstance(each, Failed) for each in outcomes] == [False, True, False, False]
    assert [each for each in outcomes if not isinstance(each, Failed)] == ["A", "C", "D"]


def test_pass_that_fails_in_lookahead_fails_in_its_turn() -> None:
    model = Launched()
    model.fits = 2

    failed: list[int] = []

    class Told:
        def passed(self, tokens: int) -> None:
            pass

        def failed(self, tokens: int) -> None:
            failed.append(tokens)

    cuts = [[0, 1], [2, 3, 4]]
    outcomes, _, _ = compute(
        model, list("abcde"), {}, lambda lengths: cuts if len(lengths) == 5 else [], memory=Told()
    )
    assert outcomes == list("ABCDE")
    # The pass that was started in vain is not counted; in its turn it is.
    assert failed == [3]
    assert model.log.count("forward c d e") == 2


def test_started_pass_is_used_if_items_and_keywords_are_the_same() -> None:
    model = Launched()
    lookahead, items = Lookahead(model), ["a", "b"]
    lookahead.start(items, {})
    # At most one.
    lookahead.start(["c"], {})
    assert compute(model, items, {}, pairs, lookahead=lookahead)[0] == ["A", "B"]
    assert model.log == ["forward a b", "results a b"]


@pytest.mark.parametrize(
    ("items", "keywords"),
    [(["b", "a"], {}), (["a"], {}), (["a", "b"], {"top_k": 1})],
    ids=["order", "fewer", "keywords"],
)
def test_started_pass_with_other_items_is_dropped(
    items: list[str], keywords: dict[str, Any]
) -> None:
    model = Launched()
    lookahead = Lookahead(model)
    lookahead.start(["a", "b"], {})
    assert lookahead.forward(items, keywords) == items
    assert len(model.log) == 2
    # And nothing of the first is kept.
    assert lookahead.forward(["a", "b"], {}) == ["a", "b"]
    assert len(model.log) == 3


def test_soft_time_limit_during_lookahead_is_raised() -> None:
    model = Launched()
    right = model.forward

    def slow(batch: Sequence[str], *_: Any, **keywords: Any) -> list[str]:
        if "c" in batch and not model.log.count("forward c"):
            model.log.append("forward c")
            raise SoftTimeLimitExceeded(1)
        return right(batch)

    model.forward = slow  # type: ignore[method-assign]
    outcomes, _, _ = compute(model, list("ab"), {}, lambda _: [[0], [1]])
    assert outcomes == ["A", "B"]
    with pytest.raises(SoftTimeLimitExceeded):
        Lookahead(model).start(["c"], {})


class Quick(Launched):
    """Knows when its device is idle."""

    idle = True

    def has_computed(self, outputs: Any) -> bool:
        self.log.append(f"look for {' '.join(outputs)}")
        return self.idle


def test_results_that_are_there_do_not_wait_for_another_pass_to_be_launched() -> None:
    model = Quick()
    outcomes, _, _ = compute(
        model, list("abc"), {}, pairs, start_next_batch=lambda: model.log.append("-")
    )
    assert outcomes == list("ABC")
    assert model.log == [
        *("forward a b", "look for a b", "results a b"),
        *("forward c", "look for c", "results c"),
    ]
    model.log.clear()
    model.idle = False
    compute(model, list("abc"), {}, pairs)
    assert model.log[:3] == ["forward a b", "look for a b", "forward c"]
