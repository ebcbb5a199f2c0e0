"""The leases of one worker in one broker database.

The lease store belongs to the process, not to a connection. After each broken connection Celery
makes a new connection, channel and QoS, while batches still run. Their acknowledgements must still
arrive, and waiting messages must be delivered again.
"""

import atexit
import itertools
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any

import redis

from batchery.redis_scripts import get_database
from batchery.transport.redis_schema import Keys, transport_scripts
from batchery.transport.suspects import (
    DELIVERY,
    Deaths,
    RunningBatches,
    build_delivery_field,
    build_expired_field,
    build_items_field,
)
from batchery.transport.worker_registry import Registration

logger = logging.getLogger("batchery.transport")

#: How long before its time a message goes back to its queue, in seconds. Devices look once a
#: second, and hold it for the rest.
RETURN_AHEAD_S = 2.0

#: How far apart the tokens of two shards are: a device may have leases of several. Lua writes whole
#: numbers below 1e14 as such, and this suffices for two years of 60,000 jobs a second.
TOKENS = 2**42

#: Maximum number of leases that one command ends; Redis answers nobody else meanwhile.
MAX_TOKENS_PER_COMMAND = 500


@dataclass(slots=True)
class Lease:
    """One leased message."""

    #: Key of the queue that the message came from.
    key: str
    #: What is known of workers that died while they ran the job; None if it is no suspect.
    deaths: Deaths | None = None
    #: The hard time limit that the job has reached, in seconds; None if it has not.
    expired_s: float | None = None
    #: Places of the items with which earlier runs of a suspect, one item at a time, have ended.
    last_items: Sequence[int] = ()
    #: The job's field in the HASH of suspects; None if it is no suspect.
    suspect: str | None = None
    #: Tag of the job's message; None until the job's completion has published messages.
    publish_tag: str | None = None
    #: Description of the dead letter that the message becomes when it is acknowledged; None for any
    #: message that may run again.
    dead_letter: Mapping[str, Any] | None = None
    #: Whether the message was handed over, and need not be once more.
    is_delivered: bool = True


class Leases(dict[str, Lease]):
    """The leases that this process holds, by token.

    One thread at a time adds them; any thread may end them.
    """

    #: The highest token that was ever here.
    last_token = 0

    def take(self, token: str, key: str) -> None:
        """Adds a lease; or replaces it, where its message is handed over again."""
        self[token] = Lease(key)
        self.last_token = max(self.last_token, int(token))

    def count_by_key(self) -> Counter[str]:
        """The number of leases on messages of each queue key."""
        return Counter(lease.key for lease in list(self.values()))

    def leave(self, tokens: Collection[str]) -> None:
        """Has some messages handed over again after the next comparison with Redis."""
        for token in tokens:
            if lease := self.get(token):
                lease.is_delivered = False


class LeaseStore:
    """The leases of one worker; for its event loop's thread, unless a method says otherwise."""

    def __init__(self, client: "redis.Redis", prefix: str, expiry_s: float, shard: int = 0) -> None:
        """Asks Redis nothing yet.

        Args:
            client: A client of the broker's database. Nobody else may close it, as channels come
                and go.
            prefix: Kombu's `global_keyprefix`.
            expiry_s: Time without a heartbeat, in seconds, after which others may take the leases.
            shard: Number of the shard of a cluster: no two have the same tokens.
        """
        # redis-py types every answer as one of an ordinary and an asynchronous client.
        self.client: Any = client
        self.keys = Keys(prefix)
        self.expiry_s = expiry_s
        self.scripts = transport_scripts(client)
        self.db = get_database(client.connection_pool)
        #: Whether all leases are gone: another worker took over, or Redis lost its data.
        self.fenced = False
        self._registration = Registration(client, self.keys, self.scripts, expiry_s)
        self.shard = shard
        self.leases = Leases()
        self.leases.last_token = shard * TOKENS
        #: What has ended here, and is not told to Redis yet, as a round trip costs 0.1 ms: tokens;
        #: those with dedupe keys; those of dead letters; those that wait for their time, each with
        #: the key of where it waits, and the time; and fields of suspects that are settled.
        self._acks: deque[str] = deque()
        self._completed: deque[tuple[str, str]] = deque()
        self._dead_letters: deque[tuple[str, Mapping[str, Any]]] = deque()
        self._postponed: deque[tuple[str, str, float]] = deque()
        self._cleared: deque[str] = deque()
        self._ends = (self._acks, self._completed, self._dead_letters, self._postponed)
        self.running_batches = RunningBatches(client, self.keys)
        #: Whether this worker is registered, and may hold leases.
        self.is_open = False
        self._flush_lock = threading.Lock()
        #: This worker's id, and the HASH of its leases; a fenced worker gets new ones.
        self.worker = self.lease_key = ""

    def describe(self, queues: Sequence[str], name: str, leased: Mapping[str, int]) -> str:
        """What others want to know of this worker, as JSON; see `Registration.info`."""
        return self._registration.info(queues=queues, name=name, leased=leased)

    def figures(self) -> dict[str, Any]:
        """What `celery inspect batchery` shows of it; from any thread."""
        scripts = {name: asdict(took) for name, took in list(self.scripts.times.items())}
        return {"held": len(self.leases), "scripts": scripts}

    def open(self) -> None:
        """Registers this worker; does nothing if it is registered."""
        if self.is_open:
            return
        self._registration.check_server()
        self._register()
        self.is_open = True
        atexit.register(self._close_quietly)

    def _register(self) -> None:
        self._registration.register(self.leases.last_token)
        self.worker = self._registration.worker
        self.lease_key = self.keys.lease(self.worker)

    def rejoin(self) -> int:
        """Forgets the leases of a fenced worker, and registers it anew.

        Returns:
            The number of leases that were lost.
        """
        lost = len(self.leases)
        self.lost(list(self.leases))
        with self._flush_lock:
            for each in (self._completed, self._dead_letters, self._postponed, self._cleared):
                each.clear()
        self.running_batches.drop()
        self.flush()
        # Usually no lease is left in Redis. But if only the list of workers was lost, nobody else
        # gives the leases back.
        self._registration.unregister()
        self._register()
        self.fenced = False
        return lost

    def close(self) -> None:
        """Gives all leases back in the original order, and unregisters this worker.

        Raises:
            redis.RedisError: Redis does not answer; other workers will recover the leases.
        """
        if not self.is_open or not self._registration.is_mine:
            return
        self.flush()
        self.is_open = False
        self.running_batches.drop_connection()
        self.leases.clear()
        atexit.unregister(self._close_quietly)
        self._registration.unregister()

    def _close_quietly(self) -> None:
        try:
            self.close()
        except redis.RedisError as error:
            logger.warning("leases could not be given back, they will expire: %s", error)

    # The leases

    def holds(self, token: str) -> bool:
        """Whether a lease is held, as far as this process knows; from any thread."""
        return token in self.leases and not self.fenced

    def note_delivery(self, token: str) -> None:
        """Notes in Redis that a suspect is about to be read, with nothing beside it."""
        note = f"alone {token} {token}"
        self.scripts.run("note", [self.keys.running(self.worker)], "HSET", DELIVERY, note)

    def forget_delivery(self) -> None:
        """Removes that note, as the suspect was read.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        self.client.hdel(self.keys.running(self.worker), DELIVERY)

    def note_items(self, token: str, places: Sequence[int]) -> None:
        """Notes with which items earlier runs of a suspect have ended, and which one begins, last.

        If Redis does not answer, nobody is blamed for what may happen.
        """
        lease = self.leases.get(token)
        if lease is not None and lease.suspect is not None:
            with suppress(redis.RedisError, OSError):
                field = build_items_field(lease.suspect)
                self.client.hset(self.keys.suspects, field, " ".join(map(str, places)))

    def blame_delivery(self, suspect: str) -> None:
        """Counts a message against which this worker has just run: it is about to end."""
        self.scripts.run("note", [self.keys.suspects], "HINCRBY", build_delivery_field(suspect), 1)
        # Whoever recovers its leases would count it once more.
        self.forget_delivery()

    def still_holds(self, token: str) -> bool:
        """Asks Redis whether it still has a lease; from any thread."""
        return bool(self.client.hexists(self.lease_key, token))

    def committed(self, token: str) -> None:
        """Forgets the lease of a job that will not be delivered again, here or elsewhere."""
        if lease := self.leases.pop(token, None):
            self._clear(lease)

    def lost(self, tokens: Iterable[str]) -> None:
        """Forgets leases that another worker has taken over."""
        for token in tokens:
            self.leases.pop(token, None)

    def _clear(self, lease: Lease) -> None:
        """Clears a suspect that is settled: Redis may forget its deaths, as its message goes."""
        if (name := lease.suspect) is not None:
            fields = (build_delivery_field, build_expired_field, build_items_field)
            self._cleared += (name, *(build(name) for build in fields))

    # Acknowledgements

    def ack(self, token: str) -> None:
        """Ends a lease soon, together with others; from any thread."""
        lease = self.leases.pop(token, None)
        if lease is None:
            return
        if lease.dead_letter is not None:
            self._dead_letters.append((token, lease.dead_letter))
        elif lease.publish_tag is not None:
            self._completed.append((token, self.keys.dedupe_keys(lease.publish_tag)))
        else:
            self._acks.append(token)
        self._clear(lease)

    def postpone(self, token: str, queue: str, due_s: float) -> None:
        """Puts a message beside its queue until its time, on the clock of `time.monotonic`.

        It is sent soon, together with others; from any thread.
        """
        if self.leases.pop(token, None) is not None:
            self._postponed.append((token, self.keys.later(queue), due_s))

    def return_due(self, queues: Sequence[str]) -> None:
        """Gives the messages whose time will soon have come back to some queues.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        if laters := [self.keys.later(queue) for queue in queues]:
            self.scripts.run("return_due", laters, RETURN_AHEAD_S, MAX_TOKENS_PER_COMMAND)

    def list_later(self, queues: Sequence[str]) -> list[bytes]:
        """The messages of some queues whose time comes next; at most some hundred of each.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        with self.client.pipeline(transaction=False) as pipe:
            for queue in queues:
                pipe.zrange(self.keys.later(queue), 0, MAX_TOKENS_PER_COMMAND - 1)
            found = itertools.chain.from_iterable(pipe.execute())
        return [value.partition(b"\0")[2] for value in found]

    def flush(self) -> None:
        """Sends what has ended; from any thread.

        Raises:
            redis.RedisError: Redis does not answer, or has no memory for a dead letter; the rest
                goes on waiting.
        """
        if not (any(self._ends) or self._cleared):
            return
        with self._flush_lock:
            cleared = len(self._cleared)
            while any(self._ends):
                self._flush_some()
            # Last, as a suspect whose message came again would be taken for a fresh job.
            if cleared:
                fields = itertools.islice(self._cleared.copy(), cleared)
                self.client.hdel(self.keys.suspects, *fields)
                _drop_first(self._cleared, cleared)

    def _flush_some(self) -> None:
        if tokens := _first(self._acks):
            self.client.hdel(self.lease_key, *tokens)
            _drop_first(self._acks, len(tokens))
        if completed := _first(self._completed):
            ended, dedupe_keys = zip(*completed, strict=True)
            self.scripts.run("ack_published", [self.lease_key, *dedupe_keys], *ended)
            _drop_first(self._completed, len(ended))
        if postponed := _first(self._postponed):
            laters = [later for _, later, _ in postponed]
            times = ((token, max(0.0, due_s - monotonic())) for token, _, due_s in postponed)
            words = itertools.chain.from_iterable(times)
            self.scripts.run("postpone", [self.lease_key, *laters], *words)
            _drop_first(self._postponed, len(postponed))
        if self._dead_letters:
            self._bury(*self._dead_letters[0])
            self._dead_letters.popleft()

    def _bury(self, token: str, letter: Mapping[str, Any]) -> bool:
        """Moves a message to the dead letters; returns whether its lease was still held."""
        keys = [self.lease_key, self.keys.dead, self.keys.dead_messages]
        return bool(self.scripts.run("dead_letter", keys, token, json.dumps(letter)))

    def requeue(self, tokens: Collection[str], *, first: bool) -> None:
        """Gives messages back to their queues.

        Args:
            tokens: Of their leases.
            first: True for the front of the queue, False for its end.

        Raises:
            redis.RedisError: Redis does not answer; the next `reconcile` delivers the messages.
        """
        if not self._registration.is_mine:
            return
        for token in tokens:
            lease = self.leases.pop(token, None)
            if lease is not None and lease.suspect is not None and not first:
                # It was settled: what comes again begins anew. Redis must know before it comes.
                self._clear(lease)
                self.flush()
        newest_first = sorted(tokens, key=int, reverse=True)
        if newest_first:
            side = "RPUSH" if first else "LPUSH"
            self.scripts.run("requeue", [self.lease_key], side, *newest_first)

    def others_wait(self) -> bool:
        """Whether other workers wait for work.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        return bool(set(self.client.hkeys(self.keys.waiting)) - {self.worker.encode()})

    def give_to_waiting(self, jobs: Iterable[tuple[str, str]]) -> set[str]:
        """Gives jobs that nobody has begun to other workers that wait for work.

        Args:
            jobs: Oldest first, each with the key of its queue's first priority step.

        Returns:
            Tokens of those that are in the front of their queues again.

        Raises:
            redis.RedisError: Redis does not answer, and nobody knows which jobs went back.
        """
        keys = [self.lease_key, self.keys.waiting]
        # Sent once: the first answer, if it was lost, would say what went back.
        gone = self.scripts.run_once(
            "give_to_waiting", keys, self.worker, *itertools.chain.from_iterable(jobs)
        )
        given = {token.decode() for token in gone}
        self.lost(given)
        return given

    def stop_waiting(self) -> None:
        """Tells other workers that this one no longer waits for work.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        self.client.hdel(self.keys.waiting, self.worker)

    # After a broken connection

    def reconcile(self) -> list[tuple[str, str, bytes]]:
        """Compares what this process knows with what Redis knows.

        Returns:
            Token, queue key and message of each message to hand over, oldest first. It was waiting
            when the connection broke, or the answer of Redis that carried it was lost.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        held, known = self.leases.copy(), self._known_tokens()
        self.lost(held.keys() - known)
        again = [each for each in known if each not in held or not held[each].is_delivered]
        again.sort(key=int)
        # Another thread may have acknowledged some meanwhile: then Redis has no value for them.
        self.flush()
        values = self.client.hmget(self.lease_key, again) if again else []
        parts = [(value or b"").partition(b"\0") for value in values]
        found = zip(again, parts, strict=True)
        return [(token, key.decode(), message) for token, (key, cut, message) in found if cut]

    def _known_tokens(self) -> set[str]:
        with self.client.pipeline(transaction=False) as pipe:
            known, last = pipe.hkeys(self.lease_key).get(self.keys.token).execute()
        if (behind := self.leases.last_token - int(last or 0)) > 0:
            # A restart of Redis may lose the last second. A token must not be given twice: an
            # acknowledgement of the first lease would end the second one.
            self.client.incrby(self.keys.token, behind)
        return {token.decode() for token in known}

    # Suspects and dead letters

    def began(self, jobs: Mapping[str, str], *, alone: bool, in_slots: bool = False) -> int:
        """Notes in Redis which jobs go to a device: they are the suspects if this worker dies.

        Redis gets the note even if this process dies now. Nobody waits for its answer. Call this
        and `ended` from one thread.

        Args:
            jobs: Task id by token.
            alone: Whether no other job runs meanwhile.
            in_slots: Whether others do on this device, and are suspects together with these.

        Returns:
            A number for `ended`.
        """
        if alone or self._cleared:
            try:
                # The batch may end this process: what was settled must not come again by that.
                self.flush()
            except (redis.RedisError, OSError) as error:
                logger.debug("what was settled is not told yet: %r", error)
        return self.running_batches.began(self.worker, jobs, alone=alone, in_slots=in_slots)

    def ended(self, batch: int) -> None:
        """Notes that a batch is back or its device has died; deaths of devices count elsewhere."""
        self.running_batches.ended(batch)

    def dead_letter(self, token: str, letter: Mapping[str, Any]) -> bool:
        """Moves a message to the dead letters now; returns whether its lease was still held."""
        self.committed(token)
        return self._bury(token, letter)


def _first(waiting: deque[Any]) -> list[Any]:
    """The first of those that wait, as many as one command may take."""
    return list(itertools.islice(waiting.copy(), MAX_TOKENS_PER_COMMAND))


def _drop_first(waiting: deque[Any], count: int) -> None:
    for _ in range(count):
        waiting.popleft()
