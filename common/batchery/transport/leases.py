"""The leases that a process holds, in its memory: no input or output."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple, Protocol


class LeaseOwner(Protocol):
    """Counts leased messages against the prefetch of a channel."""

    def adopt(self, token: str) -> None:
        """Counts a running job whose message came over an earlier channel."""

    def forget(self, token: str) -> None:
        """Stops counting a message; from any thread."""


class Deaths(NamedTuple):
    """Workers that died while they ran a suspect."""

    #: How many, while it ran alone.
    alone: int
    #: How many jobs ran together if only one died, while several ran; 0 if it ran alone since.
    group_size: int = 0


@dataclass(slots=True)
class Lease:
    """One leased message."""

    #: Counts the message until the lease ends; None while no channel counts it.
    owner: LeaseOwner | None
    #: Key of the queue that the message came from.
    key: str = ""
    #: What is known of workers that died while they ran the job; None if it is no suspect.
    deaths: Deaths | None = None
    #: The hard time limit that the job has reached, in seconds; None if it has not.
    expired_s: float | None = None
    #: The job's field in the HASH of suspects; None if it is no suspect.
    suspect: str | None = None
    #: Tag of the job's message; None until the job's completion has published messages.
    publish_tag: str | None = None
    #: Description of the dead letter that the message becomes when it is acknowledged; None for any
    #: message that may run again.
    dead_letter: Mapping[str, Any] | None = None
    #: Whether its job waits for its time.
    is_scheduled: bool = False


class Leases:
    """Leases by token. The event loop's thread adds and changes them; any thread may end them."""

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
        # Each fetch asks for the counts, and there may be many leases.
        self._counts, self._scheduled = Counter[str](), Counter[str]()
        # A handler of a signal may end leases over the thread that has it.
        self._counting = RLock()
        #: The highest token that was ever here.
        self.last_token = 0

    def __contains__(self, token: str) -> bool:
        return token in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    def get(self, token: str) -> Lease | None:
        """The lease; None if it is not held."""
        return self._held.get(token)

    def take(self, token: str, owner: LeaseOwner, key: str) -> None:
        """Adds a lease; or replaces it, where its message is handed over again."""
        with self._counting:
            self._remove(token)
            self._held[token] = Lease(owner, key)
            self._counts[key] += 1
        self.last_token = max(self.last_token, int(token))

    def forget(self, token: str) -> Lease | None:
        """Removes a lease, and tells its owner."""
        with self._counting:
            lease = self._remove(token)
        if lease is not None and lease.owner is not None:
            lease.owner.forget(token)
        return lease

    def _remove(self, token: str) -> Lease | None:
        lease = self._held.pop(token, None)
        if lease is not None:
            self._counts[lease.key] -= 1
            self._scheduled[lease.key] -= lease.is_scheduled
        return lease

    def mark_scheduled(self, token: str, *, is_scheduled: bool) -> None:
        """Notes whether a job waits for its time."""
        with self._counting:
            lease = self._held.get(token)
            if lease is not None:
                self._scheduled[lease.key] += is_scheduled - lease.is_scheduled
                lease.is_scheduled = is_scheduled

    def clear(self) -> None:
        """Removes all leases, and tells nobody."""
        with self._counting:
            self._held.clear()
            self._counts.clear()
            self._scheduled.clear()

    def by_key(self, *, scheduled: bool = False) -> Counter[str]:
        """The number of leases on messages of each queue key; or of `mark_scheduled` alone."""
        with self._counting:
            return +(self._scheduled if scheduled else self._counts)

    def abandon(self, owner: LeaseOwner) -> None:
        """Leaves all leases of an owner to the next one."""
        for lease in self._held.values():
            if lease.owner is owner:
                lease.owner = None

    def disown(self, tokens: Collection[str]) -> None:
        """Makes the next reconciliation deliver some messages again, even to the same owner."""
        for token in tokens:
            if lease := self._held.get(token):
                lease.owner = None

    def adopt(
        self, known: Collection[str], owner: LeaseOwner, active: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compares what is held here with what Redis knows, for a new owner.

        Args:
            known: Tokens that Redis has.
            owner: Counts all leases that are still held, from now on.
            active: Tokens of jobs that run.

        Returns:
            Tokens that Redis no longer has, and tokens of messages that must be delivered.
        """
        gone = []
        again = [token for token in known if token not in self._held]
        for token, lease in list(self._held.items()):
            if lease.owner is owner:
                continue
            if token not in known:
                gone.append(token)
                continue
            lease.owner = owner
            if token in active:
                owner.adopt(token)
            else:
                again.append(token)
        return gone, sorted(again, key=int)


class HeldJob(NamedTuple):
    """A job that a worker holds and has not begun."""

    token: str
    #: Whether it is the job of a batch task.
    is_batch: bool


def split_value(value: bytes) -> tuple[str, bytes]:
    """Splits the value of a lease in Redis into queue key and message."""
    key, _, message = value.partition(b"\0")
    return key.decode(), message
