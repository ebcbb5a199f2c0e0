"""How much a caller may ask for."""

import pytest

from batchery_producer.gateway.callers import COPIED_CHARS, MAX_COPIES, check_copies
from batchery_producer.gateway.problems import Kind, Problem


@pytest.mark.parametrize("came_bytes", [10, 1_000_000])
def test_request_makes_no_more_of_itself_than_some_times_its_size(came_bytes: int) -> None:
    longest = max(COPIED_CHARS, MAX_COPIES * came_bytes)
    check_copies(longest, came_bytes)
    with pytest.raises(Problem, match=f"{longest + 1} characters") as caught:
        check_copies(longest + 1, came_bytes)
    assert caught.value.kind is Kind.TOO_LARGE
