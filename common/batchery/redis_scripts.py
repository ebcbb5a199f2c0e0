"""Lua scripts: each is a file in a folder next to the code that needs it, run by its digest."""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis

#: The keys of one call of a script, and its arguments.
ScriptCall = tuple[Sequence[Any], Sequence[Any]]


#: A line with which a script asks for a file of functions, whose text comes before its own.
_INCLUDE = re.compile(r"^-- include (\w+)\.lua$", re.MULTILINE)


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

    def run(self, name: str, keys: Sequence[Any], *args: Any) -> Any:
        """Runs a script, with the retries of the client.

        Raises:
            redis.RedisError: As for any command.
        """
        command = (self._digest(name), len(keys), *keys, *args)
        try:
            return self._client.evalsha(*command)
        except redis.exceptions.NoScriptError:
            self._load(name)
            return self._client.evalsha(*command)

    def run_once(self, name: str, keys: Sequence[Any], *args: Any) -> Any:
        """Runs a script without the client's retries, which saves 20 µs.

        Raises:
            redis.RedisError: As for any command.
        """
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_command("EVALSHA", self._digest(name), len(keys), *keys, *args)
            return connection.read_response()
        except redis.exceptions.NoScriptError:
            pass  # The script is loaded below, once the connection is back in its pool.
        finally:
            pool.release(connection)
        return self.run(name, keys, *args)

    def run_many(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs a script several times in one round trip, with the retries of the client.

        Args:
            name: A script that may safely be called twice: if the server did not know it, all calls
                are sent again.
            calls: Keys and arguments of each call.

        Returns:
            The answers in order; an exception for each call that Redis refused.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        answers = self._run_pipeline(name, calls)
        if any(isinstance(each, redis.exceptions.NoScriptError) for each in answers):
            self._load(name)
            answers = self._run_pipeline(name, calls)
        return answers

    def _run_pipeline(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipe:
            for keys, args in calls:
                pipe.evalsha(self._digest(name), len(keys), *keys, *args)
            answers: list[Any] = pipe.execute(raise_on_error=False)
        return answers

    def _load(self, name: str) -> None:
        self._client.script_load(script_text(self._folder, name))

    def _digest(self, name: str) -> str:
        return script_digest(self._folder, name)
