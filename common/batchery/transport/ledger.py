"""What this process holds: the leases of one worker in one broker database.

The ledger belongs to the process, not to a connection. Celery makes a new connection, channel and
QoS after each broken one while batches still run; acknowledgements of theirs must still arrive, and
what waits must come again.
"""

import atexit
import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import redis

from batchery.transport.keys import Keys
from batchery.transport.leases import Lease, Leases, split_value
from batchery.transport.member import Member
from batchery.transport.notes import Notes
from batchery.transport.running import Running
from batchery.transport.scripts import Scripts

logger = logging.getLogger("batchery.transport")

#: Most leases that one command ends; Redis answers nobody else meanwhile.
TOKENS_PER_COMMAND = 1000


class Ledger:
    """The leases of one worker; used by the thread of its event loop, where not said otherwise."""

    def __init__(self, client: "redis.Redis", prefix: str, expiry_s: float) -> None:
        """Asks nothing of Redis yet.

        Args:
            client: Of the broker's database; the ledger's own, as channels come and go.
            prefix: Kombu's `global_keyprefix`.
            expiry_s: After which silence, in seconds, others may take this worker's leases.
        """
        #: redis-py types every answer as one of an ordinary and an asynchronous client.
        self.client: Any = client
        self.keys = Keys(prefix)
        self.expiry_s = expiry_s
        self.scripts = Scripts(client)
        self.db = int(client.connection_pool.connection_kwargs.get("db") or 0)
        #: Whether another worker took over, or Redis lost its data: every lease is gone.
        self.fenced = False
        self._member = Member(client, self.keys, self.scripts, expiry_s)
        self.leases = Leases()
        self._acks: deque[str] = deque()
        self._notes = Notes(self.keys)
        self._running = Running(client, self.keys)
        #: Beats while the ledger is open.
        self.heart: Any = None
        #: The channel that leases for it; None while it waits for the next one.
        self.holder: Any = None
        self._open = False
        self._flush_lock = threading.Lock()

    @property
    def worker(self) -> str:
        """This worker's id; another one after a fence."""
        return self._member.worker

    @property
    def lease_key(self) -> str:
        """HASH of this worker's leases; another one after a fence."""
        return self.keys.lease(self.worker)

    def open(self) -> None:
        """Enters this worker among the living; nothing if it is there.

        Raises:
            RedisUnavailable: This Redis cannot do what leases need; says what.
            redis.RedisError: It does not answer.
        """
        if self._open:
            return
        self._member.check()
        self._member.enter(self.leases.last_token)
        self._open = True
        atexit.register(self._close_quietly)

    def rejoin(self) -> int:
        """Forgets what was held before the fence and enters anew, as another worker.

        Returns:
            How many leases were lost.
        """
        lost = len(self.leases)
        self.lost(list(self.leases))
        with self._flush_lock:
            self._notes.drop()
        self._running.drop()
        self.flush()
        # Usually nothing is left. But where only the list of workers was lost, nobody else looks.
        self._member.leave()
        self._member.enter(self.leases.last_token)
        self.fenced = False
        return lost

    def close(self) -> None:
        """Gives everything back in the original order, and leaves the living.

        Raises:
            redis.RedisError: Redis does not answer; the others will find out.
        """
        if not self._open or not self._member.is_mine:
            return
        self.flush()
        self._open = False
        self._running.drop_connection()
        self.leases.clear()
        atexit.unregister(self._close_quietly)
        self._member.leave()

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

    def take(self, token: str, owner: Any, key: str) -> None:
        """Enters a lease that Redis has granted, on a message from the queue of that key."""
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

    def sent(self, token: str, publish_tag: str) -> None:
        """Remembers that the completion of a job has sent messages, of which Redis has marks."""
        if lease := self.leases.get(token):
            lease.publish_tag = publish_tag

    def still_held(self, tokens: Collection[str]) -> set[str]:
        """Which of the leases Redis still knows; one round trip, from any thread."""
        with self.client.pipeline(transaction=False) as pipe:
            for token in tokens:
                pipe.hexists(self.lease_key, token)
            return {token for token, held in zip(tokens, pipe.execute(), strict=True) if held}

    def settled(self, tokens: Iterable[str]) -> None:
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
            self._notes.cleared(lease.suspect)
        return lease

    # Acknowledgements

    def ack(self, token: str) -> None:
        """Ends a lease, soon: acknowledgements go together. From any thread."""
        lease = self._end(token)
        if lease is None:
            return
        if lease.letter is not None:
            self._notes.buried(token, lease.letter)
        elif lease.publish_tag is not None:
            self._notes.completed(token, lease.publish_tag)
        else:
            self._acks.append(token)

    def flush(self) -> None:
        """Sends the acknowledgements and notes that wait, in one round trip. From any thread.

        Raises:
            redis.RedisError: Redis does not answer; they go on waiting.
        """
        while self._acks or self._notes:
            self._flush_some()

    def _flush_some(self) -> None:
        with self._flush_lock, self.client.pipeline(transaction=False) as pipe:
            tokens = list(itertools.islice(self._acks.copy(), TOKENS_PER_COMMAND))
            if tokens:
                pipe.hdel(self.lease_key, *tokens)
            with self._notes.told_by(pipe):
                # A refusal of anything else must not hold up the acknowledgements.
                answers = pipe.execute(raise_on_error=False)
            if tokens:
                if isinstance(answers[0], Exception):
                    raise answers[0]
                for _ in tokens:
                    self._acks.popleft()
            self._notes.complete(self.scripts, self.lease_key)
            self._notes.bury(self.scripts, self.lease_key)

    def requeue(self, tokens: Collection[str], *, first: bool) -> None:
        """Gives messages back: to be taken next, or after all others that wait.

        Raises:
            redis.RedisError: Redis does not answer; they come with the next `reconcile`.
        """
        if not self._member.is_mine:
            return
        for token in tokens:
            self.leases.forget(token)
        newest_first = sorted(tokens, key=int, reverse=True)
        if newest_first:
            side = "RPUSH" if first else "LPUSH"
            self.scripts.run("requeue", [self.lease_key], side, *newest_first)

    # After a broken connection

    def reconcile(self, owner: Any, active: Collection[str]) -> list[tuple[str, str, bytes]]:
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
            # A restart cost Redis its last second. Tokens must not come twice: an acknowledgement
            # of the first would end the lease of the second.
            self.client.incrby(self.keys.token, behind)
        return {token.decode() for token in known}

    # Suspects and the dead

    def began(self, jobs: Mapping[str, str], *, alone: bool) -> int:
        """Notes which jobs are on a device, so that its worker's death can be told from theirs.

        Redis knows it soon, also if this process dies now; its answer is not waited for. For one
        thread, as `ended`.

        Args:
            jobs: Task id by token.
            alone: Whether there is no other job beside.

        Returns:
            A number for `ended`.
        """
        cleared = self._notes.take_cleared()
        return self._running.began(self.worker, jobs, alone=alone, cleared=cleared)

    def ended(self, batch: int) -> None:
        """The batch is back, or its device died: that is counted elsewhere."""
        self._running.ended(batch)

    def condemn(self, token: str, letter: Mapping[str, Any]) -> None:
        """Turns the message's acknowledgement, which is to come, into a burial."""
        if lease := self.leases.get(token):
            lease.letter = letter

    def bury(self, token: str, letter: Mapping[str, Any]) -> bool:
        """Moves a message to the dead letters; returns whether its lease was still held."""
        self._end(token)
        keys = [self.lease_key, self.keys.dead, self.keys.dead_messages]
        return bool(self.scripts.run("bury", keys, token, json.dumps(letter)))
