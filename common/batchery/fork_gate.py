"""Lets no process fork while one of our threads works: its locks would stay locked in the child.

Celery forks a child of its prefork pool whenever one ended, and then our threads are there. A child
has only the thread that forked. What another one had locked, such as the receivers of a Celery
signal, nobody unlocks there.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: How long a fork waits for our threads, in seconds. They work for a millisecond at a time. Only a
#: thread that waits for Redis works longer, and it holds no lock but that of a connection, which a
#: child does not share.
MAX_WAIT_S = 0.1


class ForkGate:
    """Counts the threads that work, and holds back new ones while a process forks."""

    def __init__(self) -> None:
        self._private: weakref.WeakSet[Any] = weakref.WeakSet()
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._working = 0
        self._forking = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """For a thread's block of work; no fork happens within it, unless the block takes long."""
        with self._changed:
            while self._forking:
                self._changed.wait()
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                if self._forking:
                    self._changed.notify_all()

    def keep_private(self, connection: Any) -> None:
        """Closes a connection in every child that is forked from now on."""
        self._private.add(connection)

    def before_fork(self) -> None:
        """Waits until no thread works; on the thread that forks."""
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: not self._working, MAX_WAIT_S)

    def after_in_parent(self) -> None:
        """Lets the threads go on."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Begins anew: the threads are the parent's, and so are its connections."""
        self._reset()
        for connection in list(self._private):
            connection.close()
        self._private.clear()


fork_gate = ForkGate()

# Windows has no fork, and clients there import this module, too.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=fork_gate.before_fork,
        after_in_parent=fork_gate.after_in_parent,
        after_in_child=fork_gate.after_in_child,
    )
