"""Queues with jobs that neither the app nor any worker knows, as where a name was misspelt.

Nothing lists the queues of a Redis. But whoever sends to one notes its binding first, as kombu
does, also a client of plain Celery. The keys of these notes are found among all others by SCAN: a
part of them in each look, as there may be millions of results.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import redis
from celery import Celery
from kombu.transport import redis as kombu_redis
from redis.exceptions import NoPermissionError

from batchery.transport.redis_schema import escape_pattern, find_own, lists_of

#: Keys that a call of SCAN looks at, and calls of one look.
SCAN_KEYS = 1000
LOOK_CALLS = 20

#: Calls of a look that is the only one: some seconds at most.
ALL_CALLS = 2000

#: Maximum number of names that are taken from a key, that are counted in a look, and that are kept.
MAX_PER_KEY = 100
MAX_COUNTED = 1000
MAX_STRAYS = 100

#: What names of queues look like: anybody may write such a key.
NAME = re.compile(r"[\w.:/@+=-]{1,100}")


class StrayQueues:
    """Looks for them, and goes on where it was the last time."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._cursor = 0
        self._found: Mapping[str, int] = {}
        #: Whether Redis refuses this user to look. Such users can send to no other queue, either.
        self._is_refused = False

    def look(self, known: Collection[str], calls: int = LOOK_CALLS) -> Mapping[str, int]:
        """The jobs that wait in each of them, by name; none where the broker is no Redis.

        Args:
            known: Names of queues that are no strays.
            calls: Maximum number of calls of SCAN.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        with self._app.connection_for_read() as connection:
            channel: Any = connection.default_channel
            if self._is_refused or not isinstance(channel, kombu_redis.Channel):
                return {}
            client = redis.Redis(connection_pool=channel.pool)
            try:
                names = {*self._found, *self._find_names(channel, client, calls)} - {*known}
            except NoPermissionError:
                self._is_refused = True
                return {}
            counts = _count(channel, client, sorted(names)[:MAX_COUNTED])
            self._found = dict([each for each in counts if each[1]][:MAX_STRAYS])
        return self._found

    def _find_names(self, channel: Any, client: Any, calls: int) -> Iterator[str]:
        pattern = escape_pattern(channel.global_keyprefix + channel.keyprefix_queue % "") + "*"
        # Of remote control and events: queues of workers and of those who ask them.
        own = (".pidbox", self._app.conf.event_exchange)
        for _ in range(calls):
            self._cursor, keys = client.scan(self._cursor, pattern, SCAN_KEYS, _type="set")
            with client.pipeline(transaction=False) as pipe:
                for key in keys:
                    if not key.decode(errors="replace").endswith(own):
                        pipe.srandmember(key, MAX_PER_KEY)
                for member in (each for members in pipe.execute() for each in members):
                    name = find_own(member.decode(errors="replace").rsplit(channel.sep, 1)[-1])
                    if NAME.fullmatch(name):
                        yield name
            if not self._cursor:
                return


def _count(channel: Any, client: Any, names: Collection[str]) -> Iterator[tuple[str, int]]:
    """The jobs in each queue; one that this user may not count, or that is no list, has none."""
    lists = {name: lists_of(channel, name) for name in names}
    with client.pipeline(transaction=False) as pipe:
        for keys in lists.values():
            for key in keys:
                pipe.llen(f"{channel.global_keyprefix}{key}")
        answers = iter(pipe.execute(raise_on_error=False))
    for name, keys in lists.items():
        lengths = [next(answers) for _ in keys]
        yield name, sum(each for each in lengths if isinstance(each, int))
