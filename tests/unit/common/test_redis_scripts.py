"""Commands are packed as redis-py packs them."""

from typing import Any

import pytest
from redis.connection import Connection

from batchery.redis_scripts import packed

COMMANDS: list[tuple[Any, ...]] = [
    ("EVALSHA", "a" * 40, 2, "key", b"\x80key", "", b"", "42 43 44", -1, 0.25),
    ("SET", "Zoë", "\u2028 \r\n $1", b"x" * 10_000),
    ("PING",),
]


@pytest.mark.parametrize("commands", [COMMANDS[:1], COMMANDS], ids=["one", "several"])
def test_packed_commands_are_those_of_redis_py(commands: list[tuple[Any, ...]]) -> None:
    connection: Any = Connection
    assert packed(*commands) == b"".join(connection().pack_commands(commands))
