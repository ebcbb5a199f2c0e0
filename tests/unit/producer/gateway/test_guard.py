"""How much a caller may ask for, and who is refused where the memory for requests is full."""

import pytest

from batchery_producer.gateway.callers import COPIED_CHARS, MAX_COPIES, Caller
from batchery_producer.gateway.guard import Buffer
from batchery_producer.gateway.problems import Kind, Problem


def caller(name: str = "one") -> Caller:
    return Caller(name, None, None, 100, 100, 100)


def test_a_caller_alone_has_half_and_who_comes_finds_room() -> None:
    buffer, first, second, third = Buffer(1200, 10), caller(), caller("two"), caller("three")
    assert buffer.keep(first, 600)
    assert not buffer.keep(first, 1)
    buffer.keep(first, -1)
    assert buffer.keep(second, 300)
    assert not buffer.keep(second, 1)
    buffer.keep(second, -1)
    assert buffer.keep(third, 150)
    # It goes back to whom it belonged to.
    buffer.keep(first, -600)
    assert buffer.keep(third, 300)
    assert dict(buffer.kept_bytes) == {"one": 0, "two": 300, "three": 450}


def test_a_little_is_there_for_everybody() -> None:
    buffer = Buffer(100, 10)
    assert not buffer.keep(caller(), 200)
    newcomer = caller("two")
    assert buffer.keep(newcomer, 10)
    assert not buffer.keep(newcomer, 1)


@pytest.mark.parametrize("came_bytes", [10, 1_000_000])
def test_request_makes_no_more_of_itself_than_some_times_its_size(came_bytes: int) -> None:
    longest = max(COPIED_CHARS, MAX_COPIES * came_bytes)
    asking = Caller("one", None, None, 1, 1, 10 * longest)
    asking.check(1, longest, came_bytes)
    with pytest.raises(Problem, match=f"{longest + 1} characters") as caught:
        asking.check(1, longest + 1, came_bytes)
    assert caught.value.kind is Kind.TOO_LARGE
