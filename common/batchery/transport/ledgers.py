"""The ledgers of this process: which channel has which."""

import os
import threading
from collections.abc import Callable
from typing import Any

from batchery.transport.ledger import Ledger

_ledgers: dict[tuple[Any, ...], list[Ledger]] = {}
_lock = threading.Lock()


def lend(identity: tuple[Any, ...], holder: Any, make: Callable[[], Ledger]) -> Ledger:
    """A ledger for a channel that begins to lease: one that another left behind, or a new one.

    Two channels never have the same one: what one of them leases just now would look like an answer
    that was lost to the other.

    Args:
        identity: Of the broker's database: where it is, its number, its prefix. A forked child has
            its own process id, and so its own ledgers.
        holder: The channel; `ledger.holder = None` gives it back.
        make: Makes a new one.
    """
    with _lock:
        ledgers = _ledgers.setdefault((os.getpid(), *identity), [])
        ledger = next((each for each in ledgers if each.holder is None), None)
        if ledger is None:
            ledger = make()
            ledgers.append(ledger)
        ledger.holder = holder
        return ledger


def retire(ledger: Ledger) -> None:
    """Forgets a ledger that is closed: the next channel may come with another password."""
    with _lock:
        for ledgers in _ledgers.values():
            if ledger in ledgers:
                ledgers.remove(ledger)
