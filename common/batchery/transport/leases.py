"""The leases that a process holds, in its memory: no input or output."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Deaths(NamedTuple):
    """Workers that died while they ran a suspect."""

    #: How many, while it ran alone.
    alone: int
    #: How many jobs ran together if only one died, while several ran; 0 if it ran alone since.
    group_size: int = 0


@dataclass(slots=True)
class Lease:
    """One leased message."""

    #: Key of the queue that the message came from.
    key: str
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
    #: Whether the message was handed over, and need not be once more.
    is_delivered: bool = True


class Leases:
    """Leases by token. One thread at a time adds them; any thread may end them."""

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

    def take(self, token: str, key: str) -> None:
        """Adds a lease; or replaces it, where its message is handed over again."""
        self._held[token] = Lease(key)
        self.last_token = max(self.last_token, int(token))

    def forget(self, token: str) -> Lease | None:
        """Removes a lease."""
        return self._held.pop(token, None)

    def clear(self) -> None:
        """Removes all leases."""
        self._held.clear()

    def count_by_key(self) -> Counter[str]:
        """The number of leases on messages of each queue key."""
        return Counter(lease.key for lease in list(self._held.values()))

    def leave(self, tokens: Collection[str]) -> None:
        """Has some messages handed over again after the next comparison."""
        for token in tokens:
            if lease := self._held.get(token):
                lease.is_delivered = False

    def compare(self, known: Collection[str]) -> tuple[list[str], list[str]]:
        """Compares what is held here with what Redis knows.

        Args:
            known: Tokens that Redis has.

        Returns:
            Tokens that Redis no longer has, and tokens of messages that must be handed over.
        """
        held = self._held.copy()
        gone = [token for token in held if token not in known]
        again = [token for token in known if token not in held or not held[token].is_delivered]
        return gone, sorted(again, key=int)


def split_value(value: bytes) -> tuple[str, bytes]:
    """Splits the value of a lease in Redis into queue key and message."""
    key, _, message = value.partition(b"\0")
    return key.decode(), message
