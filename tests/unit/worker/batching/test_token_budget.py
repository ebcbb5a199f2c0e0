"""How many tokens a forward pass may have, as memory teaches it."""

from math import ceil, log2

from hypothesis import given, settings
from hypothesis import strategies as st

from batchery_worker.batching.token_budget import (
    GAP_DIVISOR,
    GROWTH_PASSES,
    RECOVERY_PASSES,
    TokenBudget,
)

CEILINGS = st.integers(1, 100_000)

#: Thousands of passes per example, on a machine that may be busy.
SLOW = settings(max_examples=20, deadline=None)


def use(budget: TokenBudget, fits: int, passes: int) -> int:
    """Runs passes that take the whole budget, on a device that has room for so many tokens."""
    failures = 0
    for _ in range(passes):
        tokens = budget.allows()
        if tokens > fits:
            budget.failed(tokens)
            failures += 1
        else:
            budget.passed(tokens)
    return failures


@given(ceiling=CEILINGS, data=st.data())
def test_budget_halves_at_each_failure_until_it_fits(ceiling: int, data: st.DataObject) -> None:
    fits = data.draw(st.integers(1, ceiling))
    budget = TokenBudget(ceiling)
    halvings = ceil(log2(ceiling / fits)) if fits < ceiling else 0
    assert use(budget, fits, passes=halvings + 1) <= halvings
    assert fits // 2 <= budget.allows() <= fits


@SLOW
@given(ceiling=CEILINGS, data=st.data())
def test_budget_approaches_the_limit_with_few_more_failures(
    ceiling: int, data: st.DataObject
) -> None:
    fits = data.draw(st.integers(1, ceiling))
    budget = TokenBudget(ceiling)
    halvings = ceil(log2(ceiling / fits)) if fits < ceiling else 0
    steps = ceil(log2(GAP_DIVISOR)) + 1
    failures = use(budget, fits, passes=halvings + steps * (GROWTH_PASSES + 1))
    assert failures <= halvings + steps
    assert fits * (1 - 2 / GAP_DIVISOR) - 2 <= budget.allows() <= fits


@SLOW
@given(ceiling=CEILINGS, data=st.data())
def test_failing_size_is_retried_less_and_less_often(ceiling: int, data: st.DataObject) -> None:
    fits = data.draw(st.integers(1, ceiling))
    budget = TokenBudget(ceiling)
    use(budget, fits, passes=200)
    passes = 20 * RECOVERY_PASSES
    assert use(budget, fits, passes) <= passes // 50


@SLOW
@given(ceiling=CEILINGS, data=st.data())
def test_budget_recovers_when_memory_is_free_again(ceiling: int, data: st.DataObject) -> None:
    fits = data.draw(st.integers(1, ceiling))
    budget = TokenBudget(ceiling)
    use(budget, fits, passes=100)
    low = budget.allows()
    use(budget, ceiling, passes=RECOVERY_PASSES // 2)
    # Not at once: what took the memory is not gone because one pass fitted.
    assert budget.allows() <= max(low + 2, 2 * low)
    growths = ceil(log2(ceiling / low + 1) / log2(1 + 1 / 8)) + ceiling.bit_length() + 16
    use(budget, ceiling, passes=min(growths * 16 * RECOVERY_PASSES, 200_000))
    assert budget.allows() == ceiling


@given(
    ceiling=CEILINGS,
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 200_000)), max_size=200),
)
def test_budget_stays_between_one_and_the_ceiling(
    ceiling: int, events: list[tuple[bool, int]]
) -> None:
    budget = TokenBudget(ceiling)
    for failed, tokens in events:
        before = budget.allows()
        if failed:
            budget.failed(tokens)
            assert budget.allows() <= before
            # A pass that was allowed and failed is not allowed again, unless it was one token.
            assert budget.allows() < max(tokens, 2) or tokens > before
        else:
            budget.passed(tokens)
            assert budget.allows() >= before
        assert 1 <= budget.allows() <= ceiling


def test_lone_item_beyond_the_budget_changes_nothing() -> None:
    budget = TokenBudget(100)
    budget.failed(300)
    budget.passed(250)
    assert budget.allows() == 100


def test_passes_far_below_the_budget_change_nothing() -> None:
    budget = TokenBudget(1000)
    budget.failed(1000)
    for _ in range(10 * RECOVERY_PASSES):
        budget.passed(100)
    assert budget.allows() == 500


def test_budget_follows_a_changed_ceiling() -> None:
    budget = TokenBudget(1000)
    budget.ceiling = 2000
    assert budget.allows() == 2000
    budget.failed(2000)
    budget.ceiling = 500
    assert budget.allows() == 500
