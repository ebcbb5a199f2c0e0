"""What Redis is told of batches that run, so that a death can be blamed on their jobs."""

import pytest

from batchery.transport.leases import Deaths
from batchery.transport.suspects import (
    build_suspect_field,
    encode_id,
    read_deaths,
)

# What goes with acknowledgements


# Fields


def test_group_of_suspects_is_kept_as_a_number_below_zero() -> None:
    assert read_deaths(b"2") == Deaths(2, 0)
    assert read_deaths(b"-7") == Deaths(0, 7)
    assert read_deaths(b"0") == Deaths(0, 0)


@pytest.mark.parametrize("task_id", ["5f3b-9.x_y", "two words", "a:b", "\ud800", "é"])
def test_every_task_id_is_one_word_and_no_two_are_alike(task_id: str) -> None:
    word = encode_id(task_id)
    assert (word == task_id) == (task_id == "5f3b-9.x_y")
    assert not set(word) & {" ", ":"}
    assert word.isascii()


def test_field_of_a_message_that_is_malformed_is_no_field() -> None:
    assert build_suspect_field({"headers": {"id": "a b"}}) == "a%20b"
    assert build_suspect_field({"headers": [1]}) == ""
    assert build_suspect_field({}) == ""
