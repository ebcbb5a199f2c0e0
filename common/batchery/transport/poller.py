"""Waits for the connections of all channels; for those that lease, it does a little more."""

import contextlib
import socket
from queue import Empty
from time import monotonic
from typing import Any

from kombu.transport.redis import MultiChannelPoller
from kombu.utils.eventio import READ

from batchery.transport.consume import refusals_as_lost_connection

_Poller: Any = MultiChannelPoller

#: How often an idle worker looks into its queues although nothing woke it, in seconds.
SWEEP_INTERVAL_S = 1.0


class Poller(_Poller):  # type: ignore[misc]
    """Kombu's poller, for channels that may wait for a wake-up instead of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._swept_s = monotonic()
        #: Interrupts `get`: a socket to wait for, and one to write to. None where a loop waits.
        self._waker: tuple[socket.socket, socket.socket] | None = None

    def on_poll_start(self) -> None:
        """Asks for more messages where there is room, before the loop waits."""
        for channel in self._channels:
            if channel.lease_store is not None:
                channel.look_for_room()
        super().on_poll_start()

    def on_readable(self, fileno: int) -> Any:
        """Reads what has come."""
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        unasked = kind == "BRPOP" and channel.lease_store is not None and not channel._in_poll
        if unasked and fileno not in self._paused_brpop:
            # Kombu would take it for the end of the connection.
            channel.read_push()
            raise Empty
        return super().on_readable(fileno)

    def sweep(self) -> None:
        """Lets each channel see whether it has missed something; the event loop's timer calls it.

        Raises:
            redis.RedisError: Redis does not answer.
        """
        for channel in list(self._channels):
            channel.sweep()

    def flush(self) -> None:
        """Sends the acknowledgements that wait; raises as `sweep` does."""
        for channel in list(self._channels):
            if channel.lease_store is not None:
                with refusals_as_lost_connection():
                    channel.lease_store.flush()

    def get(self, callback: Any, timeout: float | None = None) -> None:
        """Waits for messages where there is no event loop, and no timer."""
        if not any(channel.lease_store is not None for channel in self._channels):
            super().get(callback, timeout)
            return
        before = self._handed_over()
        self._listen_to_wakes()
        self.flush()
        try:
            super().get(
                callback, SWEEP_INTERVAL_S if timeout is None else min(timeout, SWEEP_INTERVAL_S)
            )
        except Empty:
            if monotonic() - self._swept_s >= SWEEP_INTERVAL_S:
                self._swept_s = monotonic()
                self.sweep()
            # On a new connection, messages may have come without an event.
            if self._handed_over() == before:
                raise

    def wake(self) -> None:
        """Ends the wait of `get`, which then asks for messages again; from any thread."""
        if self._waker is not None:
            with contextlib.suppress(OSError):
                self._waker[1].send(b"\0")

    def close(self) -> None:
        """Leaves all channels."""
        if self._waker is not None:
            self.poller.unregister(self._waker[0])
            for end in self._waker:
                end.close()
            self._waker = None
        super().close()

    def _listen_to_wakes(self) -> None:
        """Has the next wait end at a wake; what came before need not be waited for."""
        if self._waker is None:
            self._waker = socket.socketpair()
            for end in self._waker:
                end.setblocking(False)
            self.poller.register(self._waker[0], READ)
        with contextlib.suppress(OSError):
            self._waker[0].recv(4096)

    def _handed_over(self) -> int:
        return sum(each.inbox.count for each in self._channels if each.lease_store is not None)
