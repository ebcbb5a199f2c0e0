"""The leases that a process holds, in its memory: no input or output."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class LeaseOwner(Protocol):
    """Counts leased messages against the prefetch of a channel."""

    def adopt(self, token: str) -> None:
        """Counts a job that still runs, whose message came over a channel that is gone."""

    def forget(self, token: str) -> None:
        """Stops counting a message; from any thread."""


@dataclass(slots=True)
class Lease:
    """One message that this process answers for."""

    #: Is told when the lease ends; None while no channel counts the message.
    owner: LeaseOwner | None
    #: Key of the queue that the message came from.
    key: str = ""
    #: How often the job ran alone in a worker that died; None if it is no suspect.
    deaths: int | None = None
    #: The job's field among the suspects; None if it is no suspect.
    suspect: str | None = None
    #: Tag of the job's message, once its completion has published messages of its own.
    publish_tag: str | None = None
    #: Set for a message that must not be taken once more. Where the message would have been
    #: acknowledged, it becomes this dead letter.
    dead_letter: Mapping[str, Any] | None = None


class Leases:
    """Leases by token; changed by the event loop's thread, ended by any thread."""

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
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
        """Enters a lease."""
        self._held[token] = Lease(owner, key)
        self.last_token = max(self.last_token, int(token))

    def forget(self, token: str) -> Lease | None:
        """Removes a lease, and tells its owner."""
        lease = self._held.pop(token, None)
        if lease is not None and lease.owner is not None:
            lease.owner.forget(token)
        return lease

    def clear(self) -> None:
        """Removes all leases, and tells nobody."""
        self._held.clear()

    def by_key(self) -> Counter[str]:
        """The number of leases on messages of each queue key."""
        return Counter(lease.key for lease in list(self._held.values()))

    def owned_by(self, owner: LeaseOwner) -> list[str]:
        """Tokens of the leases that an owner counts."""
        return [token for token, lease in self._held.items() if lease.owner is owner]

    def abandon(self, owner: LeaseOwner) -> None:
        """Leaves all leases of an owner to the next one."""
        for lease in self._held.values():
            if lease.owner is owner:
                lease.owner = None

    def disown(self, tokens: Collection[str]) -> None:
        """Leaves some leases to the next reconciliation, even if the owner stays the same."""
        for token in tokens:
            if lease := self._held.get(token):
                lease.owner = None

    def adopt(
        self, known: Collection[str], owner: LeaseOwner, active: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compares what is held here with what Redis knows, for a new owner.

        Args:
            known: Tokens that Redis has.
            owner: Counts everything that is still held from now on.
            active: Tokens of jobs that run.

        Returns:
            Tokens that Redis no longer has, and tokens of messages that must be delivered (again).
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


def split_value(value: bytes) -> tuple[str, bytes]:
    """Splits a lease as Redis has it into queue key and message."""
    key, _, message = value.partition(b"\0")
    return key.decode(), message
