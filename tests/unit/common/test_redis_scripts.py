"""Commands are packed as redis-py packs them, and scripts get what they are about in parts."""

from typing import Any

import pytest
from redis.connection import Connection

from batchery.redis_scripts import cut_into_parts, packed

COMMANDS: list[tuple[Any, ...]] = [
    ("EVALSHA", "a" * 40, 2, "key", b"\x80key", "", b"", "42 43 44", -1, 0.25),
    ("SET", "Zoë", "\u2028 \r\n $1", b"x" * 10_000),
    ("PING",),
]


@pytest.mark.parametrize("commands", [COMMANDS[:1], COMMANDS], ids=["one", "several"])
def test_packed_commands_are_those_of_redis_py(commands: list[tuple[Any, ...]]) -> None:
    connection: Any = Connection
    assert packed(*commands) == b"".join(connection().pack_commands(commands))


def test_a_part_ends_with_the_item_that_reaches_a_maximum() -> None:
    texts = ["xxxx", "xxxx", "y", "xxxx", "zzz", "", ""]
    assert [*map(len, cut_into_parts(texts, len, 8, 100))] == [2, 3, 2]
    assert [*map(len, cut_into_parts(texts, len, 100, 3))] == [3, 3, 1]
    assert list(cut_into_parts([], len, 8, 100)) == []
