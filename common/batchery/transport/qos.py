"""Which messages a channel counts against its prefetch, and how they are settled."""

import logging
from typing import TYPE_CHECKING, Any

import redis
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual

if TYPE_CHECKING:
    _QoS: Any
else:
    _QoS = kombu_redis.QoS

logger = logging.getLogger("batchery.transport")

#: Maximum number of messages of one fetch where the prefetch has no limit.
MAX_UNLIMITED_FETCH = 1000


class QoS(_QoS):  # type: ignore[misc]
    """Counts leased messages, which need no entry of their own in Redis: the lease is it.

    Messages that came another way, such as by `basic_get`, are treated as kombu does.
    """

    @property
    def free(self) -> int:
        """How many more messages the channel may hold."""
        if "can_consume" in vars(self):
            # Celery puts it there for `worker_disable_prefetch`, and wants to be asked each time.
            return 1
        if not self.prefetch_count:
            return MAX_UNLIMITED_FETCH
        return int(max(0, self.prefetch_count - len(self._delivered) + len(self._dirty)))

    def is_leased(self, tag: str) -> bool:
        """Whether a message has a lease, or is one of kombu's."""
        # Stock tags are UUIDs, tokens are numbers.
        return self.channel.lease_store is not None and tag.isdigit()

    def append(self, message: Any, delivery_tag: str) -> None:
        """Counts a message."""
        if self.is_leased(delivery_tag):
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def adopt(self, token: str) -> None:
        """Counts a job that still runs, whose message came over a channel that is gone."""
        virtual.QoS.append(self, None, token)

    def forget(self, token: str) -> None:
        """Stops counting a message; from any thread."""
        # A malformed message was never delivered, and so never counted.
        if token in self._delivered:
            self._dirty.add(token)
        self.channel.make_room()

    def ack(self, delivery_tag: str) -> None:
        """Settles a message; Redis is told together with others, before the loop waits again."""
        if self.is_leased(delivery_tag):
            self.channel.lease_store.ack(delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Drops a message, or gives it back to the end of its queue, as kombu does."""
        if not self.is_leased(delivery_tag):
            super().reject(delivery_tag, requeue)
        elif requeue:
            self.channel.lease_store.requeue([delivery_tag], first=False)
        else:
            self.channel.lease_store.ack(delivery_tag)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Gives back what plain workers have held for too long, if there is room for it."""
        try:
            super().restore_visible(*args, **kwargs)
        except redis.ResponseError as error:
            # At maxmemory kombu gets no lock, and the error would end the worker. It tries again.
            logger.debug("nothing is restored of what plain workers hold: %r", error)

    def restore_unacked(self, *args: Any, **kwargs: Any) -> Any:
        """Gives back what the channel counts, unless the connection broke."""
        store = self.channel.lease_store
        if store is not None:
            self._flush()
            for tag in [tag for tag in self._delivered if self.is_leased(tag)]:
                del self._delivered[tag]
            if self.channel.is_broken:
                store.leases.abandon(self)
            elif tokens := store.leases.owned_by(self):
                store.requeue(tokens, first=True)
                logger.info("jobs given back to their queues: %d", len(tokens))
        return super().restore_unacked(*args, **kwargs)

    def restore_unacked_once(self, stderr: Any = None) -> None:
        """Gives back what the channel counts, as the channel closes."""
        if self.channel.lease_store is not None:
            # Kombu does it only where it counts messages, and logs how many.
            self.restore_unacked()
        super().restore_unacked_once(stderr)
