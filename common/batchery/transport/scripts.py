"""The Lua scripts of the leases; each file says which keys it touches."""

from functools import cache
from pathlib import Path
from typing import Any

import redis

LUA = Path(__file__).parent / "lua"


@cache
def source(name: str) -> str:
    """Text of a script; `name` without ending."""
    return (LUA / f"{name}.lua").read_text()


class Scripts:
    """The scripts, on one client; safe for use by several threads, as the client is."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client = client
        self._scripts: dict[str, Any] = {}

    def run(self, name: str, keys: list[str], *args: Any) -> Any:
        """Runs a script; loads it where the server does not know it (any more).

        Raises:
            redis.RedisError: As for any command.
        """
        if name not in self._scripts:
            self._scripts[name] = self._client.register_script(source(name))
        return self._scripts[name](keys=keys, args=list(args))
