"""What this process holds: the leases of one worker in one broker database.

The lease store belongs to the process, not to a connection. Celery makes a new connection, channel
and QoS after each broken one, while batches still run. Their acknowledgements must still arrive,
and what waits must come again.
"""

import atexit
import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import redis

from batchery.transport.leases import Lease, LeaseOwner, Leases, split_value
from batchery.transport.redis_schema import Keys, transport_scripts
from batchery.transport.suspects import AckBookkeeping, RunningBatches
from batchery.transport.worker_registry import Registration

logger = logging.getLogger("batchery.transport")

#: Maximum number of leases that one command ends; Redis answers nobody else meanwhile.
MAX_TOKENS_PER_COMMAND = 1000


class Stoppable(Protocol):
    """A thread that can be told to end."""

    def stop(self) -> None:
        """Ends it; returns at once."""


class LeaseStore:
    """The leases of one worker; for the thread of its event loop, where nothing else is said."""

    def __init__(self, client: "redis.Redis", prefix: str, expiry_s: float) -> None:
        """Asks Redis nothing yet.

        Args:
            client: A client of the broker's database that nobody else closes: channels come and go.
            prefix: Kombu's `global_keyprefix`.
            expiry_s: Silence of this worker, in seconds, after which others may take its leases.
        """
        # redis-py types every answer as one of an ordinary and an asynchronous client.
        self.client: Any = client
        self.keys = Keys(prefix)
        self.expiry_s = expiry_s
        self.scripts = transport_scripts(client)
        self.db = int(client.connection_pool.connection_kwargs.get("db") or 0)
        #: Whether all leases are gone: another worker took over, or Redis lost its data.
        self.fenced = False
        self._registration = Registration(client, self.keys, self.scripts, expiry_s)
        self.leases = Leases()
        self._acks: deque[str] = deque()
        self._bookkeeping = AckBookkeeping(self.keys)
        self._running_batches = RunningBatches(client, self.keys)
        #: Runs while the store is open.
        self.heartbeat: Stoppable | None = None
        #: The channel that uses this store; None while the store waits for the next one.
        self.holder: object | None = None
        self._open = False
        self._flush_lock = threading.Lock()

    @property
    def worker(self) -> str:
        """This worker's id; a new one after a fence."""
        return self._registration.worker

    @property
    def lease_key(self) -> str:
        """HASH of this worker's leases; a new one after a fence."""
        return self.keys.lease(self.worker)

    def open(self) -> None:
        """Registers this worker; does nothing if it is registered.

        Raises:
            RedisUnavailable: This Redis cannot do what leases need; says what.
            redis.RedisError: Redis does not answer.
        """
        if self._open:
            return
        self._registration.check_server()
        self._registration.register(self.leases.last_token)
        self._open = True
        atexit.register(self._close_quietly)

    def rejoin(self) -> int:
        """Forgets what was held before the fence, and registers as another worker.

        Returns:
            The number of leases that were lost.
        """
        lost = len(self.leases)
        self.lost(list(self.leases))
        with self._flush_lock:
            self._bookkeeping.drop()
        self._running_batches.drop()
        self.flush()
        # Usually nothing is left. But if only the list of workers was lost, nobody else looks.
        self._registration.unregister()
        self._registration.register(self.leases.last_token)
        self.fenced = False
        return lost

    def close(self) -> None:
        """Gives everything back in the original order, and unregisters this worker.

        Raises:
            redis.RedisError: Redis does not answer; other workers will find out.
        """
        if not self._open or not self._registration.is_mine:
            return
        self.flush()
        self._open = False
        self._running_batches.drop_connection()
        self.leases.clear()
        atexit.unregister(self._close_quietly)
        self._registration.unregister()

    @property
    def is_open(self) -> bool:
        """Whether this worker holds leases, or may."""
        return self._open

    def _close_quietly(self) -> None:
        try:
            self.close()
        except redis.RedisError as error:
            logger.warning("leases could not be given back, they will expire: %s", error)

    # What is held

    def take(self, token: str, owner: LeaseOwner, key: str) -> None:
        """Enters a lease that Redis has granted on a message from the queue of that key."""
        self.leases.take(token, owner, key)

    def holds(self, token: str) -> bool:
        """Whether a lease is held, as far as this process knows; from any thread."""
        return token in self.leases and not self.fenced

    def deaths(self, token: str) -> int | None:
        """How often a job ran alone in a worker that died; None if it is no suspect."""
        lease = self.leases.get(token)
        return None if lease is None else lease.deaths

    def suspect(self, token: str, suspect: str, deaths: int) -> None:
        """Remembers that a job was on a device when its worker died; `suspect` is its field."""
        if lease := self.leases.get(token):
            lease.suspect, lease.deaths = suspect, deaths

    def published(self, token: str, publish_tag: str) -> None:
        """Remembers that Redis has dedupe keys of what the completion of a job has published."""
        if lease := self.leases.get(token):
            lease.publish_tag = publish_tag

    def still_held(self, tokens: Collection[str]) -> set[str]:
        """Asks which of the leases Redis still knows; one round trip, from any thread."""
        with self.client.pipeline(transaction=False) as pipe:
            for token in tokens:
                pipe.hexists(self.lease_key, token)
            return {token for token, held in zip(tokens, pipe.execute(), strict=True) if held}

    def committed(self, tokens: Iterable[str]) -> None:
        """Forgets leases that a commit has deleted."""
        for token in tokens:
            self._end(token)

    def lost(self, tokens: Iterable[str]) -> None:
        """Forgets leases that another worker has taken over."""
        for token in tokens:
            self.leases.forget(token)

    def _end(self, token: str) -> Lease | None:
        """Forgets a lease of a job that will not come again, here or elsewhere."""
        lease = self.leases.forget(token)
        if lease is not None and lease.suspect is not None:
            self._bookkeeping.cleared(lease.suspect)
        return lease

    # Acknowledgements

    def ack(self, token: str) -> None:
        """Ends a lease soon, together with others; from any thread."""
        lease = self._end(token)
        if lease is None:
            return
        if lease.dead_letter is not None:
            self._bookkeeping.dead_lettered(token, lease.dead_letter)
        elif lease.publish_tag is not None:
            self._bookkeeping.completed(token, lease.publish_tag)
        else:
            self._acks.append(token)

    def flush(self) -> None:
        """Sends the acknowledgements and the bookkeeping that wait; from any thread.

        Raises:
            redis.RedisError: Redis does not answer; they go on waiting.
        """
        while self._acks or self._bookkeeping:
            self._flush_some()

    def _flush_some(self) -> None:
        with self._flush_lock, self.client.pipeline(transaction=False) as pipe:
            tokens = list(itertools.islice(self._acks.copy(), MAX_TOKENS_PER_COMMAND))
            if tokens:
                pipe.hdel(self.lease_key, *tokens)
            with self._bookkeeping.sent_by(pipe):
                # A refusal of anything else must not hold up the acknowledgements.
                answers = pipe.execute(raise_on_error=False)
            if tokens:
                if isinstance(answers[0], Exception):
                    raise answers[0]
                for _ in tokens:
                    self._acks.popleft()
            self._bookkeeping.send_completed(self.scripts, self.lease_key)
            self._bookkeeping.send_dead_letters(self.scripts, self.lease_key)

    def requeue(self, tokens: Collection[str], *, first: bool) -> None:
        """Gives messages back to their queues.

        Args:
            tokens: Of their leases.
            first: True for the front of the queue, False for its end.

        Raises:
            redis.RedisError: Redis does not answer; the messages come with the next `reconcile`.
        """
        if not self._registration.is_mine:
            return
        for token in tokens:
            self.leases.forget(token)
        newest_first = sorted(tokens, key=int, reverse=True)
        if newest_first:
            side = "RPUSH" if first else "LPUSH"
            self.scripts.run("requeue", [self.lease_key], side, *newest_first)

    # After a broken connection

    def reconcile(self, owner: LeaseOwner, active: Collection[str]) -> list[tuple[str, str, bytes]]:
        """Compares what this process knows with what Redis knows, for a new channel.

        Args:
            owner: Counts all leases from now on.
            active: Tokens of jobs that still run; they must not come again.

        Returns:
            Token, queue key and message of what must be delivered (again), oldest first: it waited
            when the connection broke, or the answer that brought it was lost.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        gone, again = self.leases.adopt(self._known_tokens(), owner, active)
        self.lost(gone)
        # What another thread has acknowledged meanwhile has no value any more.
        self.flush()
        values = self.client.hmget(self.lease_key, again) if again else []
        found = zip(again, values, strict=True)
        return [(token, *split_value(value)) for token, value in found if value is not None]

    def _known_tokens(self) -> set[str]:
        with self.client.pipeline(transaction=False) as pipe:
            known, last = pipe.hkeys(self.lease_key).get(self.keys.token).execute()
        if (behind := self.leases.last_token - int(last or 0)) > 0:
            # A restart cost Redis its last second. A token must not come twice: an acknowledgement
            # of the first lease would end the second.
            self.client.incrby(self.keys.token, behind)
        return {token.decode() for token in known}

    # Suspects and dead letters

    def began(self, jobs: Mapping[str, str], *, alone: bool) -> int:
        """Notes which jobs are on a device, so that a death of this worker can be blamed on them.

        Redis will know it even if this process dies now; nobody waits for its answer. For one
        thread, as `ended`.

        Args:
            jobs: Task id by token.
            alone: Whether no other job runs meanwhile.

        Returns:
            A number for `ended`.
        """
        cleared = self._bookkeeping.take_cleared()
        return self._running_batches.began(self.worker, jobs, alone=alone, cleared=cleared)

    def ended(self, batch: int) -> None:
        """Notes that a batch is back, or that its device died, which is counted elsewhere."""
        self._running_batches.ended(batch)

    def dead_letter_on_ack(self, token: str, letter: Mapping[str, Any]) -> None:
        """Makes a message a dead letter at the moment when it will be acknowledged."""
        if lease := self.leases.get(token):
            lease.dead_letter = letter

    def dead_letter(self, token: str, letter: Mapping[str, Any]) -> bool:
        """Makes a message a dead letter now; returns whether its lease was still held."""
        self._end(token)
        keys = [self.lease_key, self.keys.dead, self.keys.dead_messages]
        return bool(self.scripts.run("dead_letter", keys, token, json.dumps(letter)))


_stores: dict[tuple[Any, ...], list[LeaseStore]] = {}
_lock = threading.Lock()


def acquire_lease_store(
    identity: tuple[Any, ...], holder: object, make: Callable[[], LeaseStore]
) -> LeaseStore:
    """Gives a channel that begins to lease a store: one that another channel left, or a new one.

    Two channels never share a store: what one of them leases just now would look to the other like
    an answer that was lost.

    Args:
        identity: Where the broker's database is, its number, and its key prefix. A forked child has
            its own process id, and so its own stores.
        holder: The channel; `store.holder = None` gives the store back.
        make: Makes a new store.
    """
    with _lock:
        stores = _stores.setdefault((os.getpid(), *identity), [])
        store = next((each for each in stores if each.holder is None), None)
        if store is None:
            store = make()
            stores.append(store)
        store.holder = holder
        return store


def discard_lease_store(store: LeaseStore) -> None:
    """Forgets a store that is closed: the next channel may come with another password."""
    with _lock:
        for stores in _stores.values():
            if store in stores:
                stores.remove(store)
