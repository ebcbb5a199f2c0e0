"""Lua scripts: each is a file in a folder next to the code that needs it, run by its digest."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import redis
from hiredis import pack_command

T = TypeVar("T")

#: A line with which a script asks for a file of functions, whose text comes before its own.
_INCLUDE = re.compile(r"^-- include (\w+)\.lua$", re.MULTILINE)


def get_database(pool: Any) -> int:
    """The number of the database of a pool's connections."""
    return int(pool.connection_kwargs.get("db") or 0)


def find_server(pool: Any) -> tuple[Any, ...]:
    """The server of a pool's connections: a Sentinel's by its name, a cluster's by the slot."""
    given = pool.connection_kwargs
    names = ("host", "port", "path", "cluster", "slot")
    return getattr(pool, "service_name", None), *map(given.get, names)


def find_place(pool: Any) -> tuple[Any, ...]:
    """The server and the database of a pool's connections."""
    return *find_server(pool), get_database(pool)


@cache
def script_text(folder: Path, name: str) -> str:
    """The text of a script, behind the texts of the files that it includes.

    Args:
        folder: Where its file is, and those that it includes by `-- include other.lua`.
        name: Name of the file, without its ending.
    """
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    return "".join((*(script_text(folder, other) for other in _INCLUDE.findall(text)), text))


@cache
def script_digest(folder: Path, name: str) -> str:
    """The SHA-1 by which Redis knows a script; arguments as for `script_text`."""
    text = script_text(folder, name)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def packed(*commands: Sequence[Any]) -> bytes:
    """Packs commands as Redis reads them, for a connection's `send_packed_command`.

    Args:
        commands: The words of each: texts, bytes and numbers.
    """
    return b"".join(map(pack_command, map(tuple, commands)))


def cut_into_parts(
    items: Iterable[T], count_bytes: Callable[[T], int], max_bytes: int, max_items: int
) -> Iterator[list[T]]:
    """Cuts items into parts, one for each call of a script: Redis serves nobody else meanwhile.

    Args:
        items: What the calls are about.
        count_bytes: Size of an item.
        max_bytes: A part ends with the item with which it has so many.
        max_items: The same.
    """
    part: list[T] = []
    part_bytes = 0
    for item in items:
        part.append(item)
        part_bytes += count_bytes(item)
        if part_bytes >= max_bytes or len(part) == max_items:
            yield part
            part, part_bytes = [], 0
    if part:
        yield part


@dataclass(slots=True)
class ScriptTime:
    """How often a script was run, and how long its answers took, all together."""

    calls: int = 0
    seconds: float = 0.0


class RedisScripts:
    """The scripts of one folder, run on one client; as thread-safe as the client is.

    If the server does not know a script, it is given the text, and the script runs then.
    """

    def __init__(self, client: "redis.Redis", folder: Path) -> None:
        """Reads no file yet, and does not connect.

        Args:
            client: A client without kombu's key prefix, which would reach only the first key.
            folder: Where the files are.
        """
        # redis-py types every answer as one of an ordinary and an asynchronous client.
        self._client: Any = client
        self._folder = folder
        self._connection: Any = None
        #: By name of the script. Threads that run the same one at once may lose a call.
        self.times: defaultdict[str, ScriptTime] = defaultdict(ScriptTime)

    @property
    def pool(self) -> Any:
        """The connections of its client."""
        return self._client.connection_pool

    def run(self, name: str, keys: Sequence[Any], *args: Any) -> Any:
        """Runs a script, with the retries of the client.

        Raises:
            redis.RedisError: As for any command.
        """
        command = (self._digest(name), len(keys), *keys, *args)
        took, began_s = self.times[name], perf_counter()
        try:
            return self._client.evalsha(*command)
        except redis.exceptions.NoScriptError:
            self._load(name)
            return self._client.evalsha(*command)
        finally:
            took.calls += 1
            took.seconds += perf_counter() - began_s

    def run_once(self, name: str, keys: Sequence[Any], *args: Any) -> Any:
        """Runs a script as `send` does, and reads its answer.

        Raises:
            redis.RedisError: As for any command.
        """
        return self.send(name, keys, *args)()

    def send(self, name: str, keys: Sequence[Any], *args: Any) -> Callable[[], Any]:
        """Sends a script without the client's retries, its packing and its pool; for one thread.

        All three together take as long as a script for a single job.

        Returns:
            Reads the answer, and raises what this raises. It must be called before the next script
            is sent.

        Raises:
            redis.RedisError: As for any command.
        """
        connection = self._connected()
        command = ("EVALSHA", self._digest(name), len(keys), *keys, *args)
        took, began_s = self.times[name], perf_counter()
        try:
            connection.send_packed_command((packed(command),))
        except BaseException:
            # The client may have no other one.
            self.release()
            raise

        def read() -> Any:
            try:
                answer = connection.read_response()
            except redis.exceptions.NoScriptError:
                self.release()
                return self.run(name, keys, *args)
            except BaseException:
                self.release()
                raise
            took.calls += 1
            took.seconds += perf_counter() - began_s
            return answer

        return read

    def _connected(self) -> Any:
        """The connection of `run_once`, checked as the pool would check it."""
        connection = self._connection
        if connection is not None:
            try:
                # It connects first if it has to.
                if not connection.can_read():
                    return connection
            except (redis.ConnectionError, redis.TimeoutError, OSError):
                pass  # The pool connects it anew.
            self.release()
        self._connection = self._client.connection_pool.get_connection()
        return self._connection

    def release(self) -> None:
        """Gives the connection of `send` back to the client's pool, where others may need it."""
        connection, self._connection = self._connection, None
        self._client.connection_pool.release(connection)

    def _load(self, name: str) -> None:
        self._client.script_load(script_text(self._folder, name))

    def _digest(self, name: str) -> str:
        return script_digest(self._folder, name)
