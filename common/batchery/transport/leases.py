"""The leases that a process holds, in its memory: no I/O."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Lease:
    """One message that this process answers for."""

    #: Told when the lease ends: the QoS of the channel that counts the message, None in between.
    owner: Any
    #: The key of the queue that it came from.
    key: str = ""
    #: Set for a job that was on a device when its worker died: how often it was there alone.
    deaths: int | None = None
    #: Its field among the suspects.
    suspect: str | None = None
    #: Set for a job whose completion has sent messages: the tag of its own.
    publish_tag: str | None = None
    #: Set for a message that must not be taken once more: it is buried where it would have been
    #: acknowledged.
    letter: Mapping[str, Any] | None = None


class Leases:
    """Leases by token; changed by the event loop's thread, ended by any."""

    def __init__(self) -> None:
        self._held: dict[str, Lease] = {}
        #: The highest token that was ever here.
        self.last_token = 0

    def __contains__(self, token: str) -> bool:
        return token in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Any:
        return iter(list(self._held))

    def get(self, token: str) -> Lease | None:
        """The lease, if it is held."""
        return self._held.get(token)

    def take(self, token: str, owner: Any, key: str) -> None:
        """Enters one."""
        self._held[token] = Lease(owner, key)
        self.last_token = max(self.last_token, int(token))

    def forget(self, token: str) -> Lease | None:
        """Removes one, and tells its owner."""
        lease = self._held.pop(token, None)
        if lease is not None and lease.owner is not None:
            lease.owner.forget(token)
        return lease

    def clear(self) -> None:
        """Removes all, and tells nobody."""
        self._held.clear()

    def by_key(self) -> Counter[str]:
        """How many there are on messages of each queue key."""
        return Counter(lease.key for lease in list(self._held.values()))

    def owned_by(self, owner: Any) -> list[str]:
        """Tokens that a channel counts."""
        return [token for token, lease in self._held.items() if lease.owner is owner]

    def abandon(self, owner: Any) -> None:
        """Leaves what a channel counts to the next one."""
        for lease in self._held.values():
            if lease.owner is owner:
                lease.owner = None

    def disown(self, tokens: Collection[str]) -> None:
        """Leaves some to the next reconciliation, even with the same owner."""
        for token in tokens:
            if lease := self._held.get(token):
                lease.owner = None

    def adopt(
        self, known: Collection[str], owner: Any, active: Collection[str]
    ) -> tuple[list[str], list[str]]:
        """Compares what is here with what Redis knows, for a new owner.

        Args:
            known: Tokens that Redis has.
            owner: Counts all that is still held from now on.
            active: Tokens of jobs that run.

        Returns:
            Tokens that Redis has no more, and tokens that are to be delivered (again).
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
    """Queue key and message of a lease, as Redis has them."""
    key, _, message = value.partition(b"\0")
    return key.decode(), message
